"""What one process of the transfer connector is told."""

import msgspec

from kvferry.errors import ConfigError

SECRET_BYTES_MIN = 16


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Durations are of the process's own clock.

    `secret`: shared by all engines of one deployment; without one nothing listens beyond loopback
    and every transfer is refused. `bind_host` is where the listener listens (empty: loopback),
    `advertise_host` what peers are told to dial; port 0 takes a free one.
    """

    secret: bytes = b""
    bind_host: str = "127.0.0.1"
    bind_port: int = 0
    advertise_host: str = "127.0.0.1"
    # producer
    lease_s: float = 30.0
    lease_total_s: float = 600.0
    leased_blocks_max: int = 1 << 16
    early_s: float = 2.0
    # consumer
    staging_bytes: int = 256 << 20
    slot_bytes: int = 8 << 20
    quarantine_bytes_max: int = 128 << 20
    claim_deadline_s: float = 5.0
    read_deadline_s: float = 30.0
    rest_s: float = 30.0
    peer_idle_s: float = 600.0
    redial_s: float = 1.0
    dial_timeout_s: float = 5.0
    tokens_min: int = 64

    @property
    def renewal_s(self) -> float:
        """How often a lease is renewed: two renewals may be lost."""
        return self.lease_s / 4

    @property
    def repeat_s(self) -> float:
        """After how long a claim without an answer is said again."""
        return min(self.renewal_s, 0.25)


def check_settings(settings: Settings) -> None:
    """Raises ConfigError for what cannot be right."""
    if settings.secret and len(settings.secret) < SECRET_BYTES_MIN:
        raise ConfigError(
            "transfer.secret",
            f"the secret has {len(settings.secret)} bytes; it must have {SECRET_BYTES_MIN} or more",
            key="secret",
        )
    if settings.quarantine_bytes_max > settings.staging_bytes:
        raise ConfigError(
            "transfer.quarantine_bytes_max",
            "quarantine_bytes_max is a part of staging_bytes and cannot be more",
            key="quarantine_bytes_max",
        )
    if settings.lease_total_s < settings.lease_s:
        raise ConfigError(
            "transfer.lease_total_s", "lease_total_s is less than lease_s", key="lease_total_s"
        )
