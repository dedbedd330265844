"""What one process of the transfer connector is told: `kv_connector_extra_config`, and a secret.

As in `kvferry.config`: fields that say what they are for are settings, and the reference page is
generated from them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvferry.config import (
    SECRET_VARIABLE,
    Seconds,
    cluster,
    decode_fields,
    process,
    transfer_secret,
)
from kvferry.errors import ConfigError

SECRET_BYTES_MIN = 16

_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Staging = Annotated[int, Meta(ge=1 << 16, le=1 << 44)]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Durations are of the process's own clock. `secret`: shared by all engines of one deployment,
    from `secret_file` or the environment; without one every transfer is refused."""

    secret: bytes = b""
    secret_file: Annotated[
        str | None,
        process(
            description="File with the secret that all engines of a deployment share, at least 16"
            f" bytes. Default: the environment variable `{SECRET_VARIABLE}`."
        ),
    ] = None
    model_id: Annotated[
        _Name | None,
        cluster(
            description="Name of the model. Default: derived from its commit or files. Set it only"
            " if you know that the bytes are interchangeable."
        ),
    ] = None
    weights_id: Annotated[
        _Name | None,
        cluster(
            description="Name of the weights after an update in a running engine. Without it, an"
            " engine exchanges nothing after an update."
        ),
    ] = None
    direction: Annotated[
        Literal["pull", "push"],
        cluster(
            description="Who moves the bytes: `pull`, consumers read when a prefill has finished;"
            " `push`, producers write while they prefill, into the consumers' staging."
        ),
    ] = "pull"
    bind_host: Annotated[
        str,
        process(
            description="Where a producer listens for handshakes: an address or name, IPv4 or IPv6."
        ),
    ] = "127.0.0.1"
    bind_port: Annotated[
        int,
        process(
            ge=0,
            le=65535,
            description="Its port; 0 takes a free one. Data-parallel engines count up from it.",
        ),
    ] = 0
    advertise_host: Annotated[
        str,
        process(description="What consumers dial: this machine's address as they see it."),
    ] = "127.0.0.1"
    # producer
    lease_s: Annotated[
        Seconds,
        process(description="How long a producer keeps blocks for a consumer that says nothing."),
    ] = 30.0
    lease_total_s: Annotated[
        Seconds, process(description="And how long at most, however often it is asked to.")
    ] = 600.0
    leased_blocks_max: Annotated[
        int,
        process(
            ge=0,
            le=1 << 40,
            description="Blocks that a producer keeps for consumers at most; beyond it, prefills"
            " are answered without remote KV.",
        ),
    ] = 1 << 16
    early_s: Annotated[
        Seconds,
        process(
            description="How long a producer's rank waits for its scheduler to name a transfer that"
            " a consumer asks for, before it says that there is none."
        ),
    ] = 2.0
    # consumer, and a producer that pushes
    staging_bytes: Annotated[
        _Staging,
        process(description="Memory of each rank in which reads land, or that is written from."),
    ] = 256 << 20
    slot_bytes: Annotated[
        _Staging | None,
        process(
            description="The part of it that one read or page takes at most. Default: 8 MiB; 64 MiB"
            " on a GPU, where reads are short and each costs the same."
        ),
    ] = None
    page_tokens_max: Annotated[
        int,
        process(
            ge=1,
            le=1 << 20,
            description="Where `direction` is `push`: tokens in one page at most, on the consumer's"
            " word. Fewer: the first bytes go earlier; a page also fits a slot, of both sides.",
        ),
    ] = 512
    quarantine_bytes_max: Annotated[
        int,
        process(
            ge=0,
            le=1 << 44,
            description="How much of it may be out of use, for reads and writes that nobody can"
            " call back, before nothing new is transferred.",
        ),
    ] = 128 << 20
    claim_deadline_s: Annotated[
        Seconds,
        process(description="A producer that has not answered by then is done without."),
    ] = 5.0
    read_deadline_s: Annotated[
        Seconds, process(description="A load that is not complete by then is given up.")
    ] = 30.0
    rest_s: Annotated[
        Seconds,
        process(description="How long staging rests after a read or write that was lost."),
    ] = 30.0
    peer_idle_s: Annotated[
        Seconds, process(description="After how long an unused peer is forgotten.")
    ] = 600.0
    redial_s: Annotated[
        Seconds, process(description="How long a peer that failed is left alone.")
    ] = 1.0
    dial_timeout_s: Annotated[Seconds, process(description="How long a handshake may take.")] = 5.0
    tokens_min: Annotated[
        int,
        process(ge=1, le=1 << 30, description="Fewer tokens are computed, not transferred."),
    ] = 64
    allow_failed_requests: Annotated[
        bool,
        process(
            description="Start although `kv_load_failure_policy` is `fail`: a transfer that does"
            " not succeed then fails its request."
        ),
    ] = False
    allow_weight_updates: Annotated[
        bool,
        process(
            description="Start although `weight_transfer_config` is set: whoever updates weights"
            " then resets the cache with `reset_connector=True`."
        ),
    ] = False


def decode(options: Mapping[str, Any]) -> Settings:
    """`kv_connector_extra_config` and the secret. Raises ConfigError, also if there is none."""
    values = decode_fields(options, Settings)
    settings = Settings(secret=transfer_secret(values.get("secret_file")), **values)
    if not settings.secret:
        raise ConfigError(
            "transfer.secret",
            "the transfer connector needs a secret that producers and consumers share: set"
            f" {SECRET_VARIABLE}, or secret_file in kv_connector_extra_config",
            key="secret_file",
        )
    check_settings(settings)
    return settings


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
