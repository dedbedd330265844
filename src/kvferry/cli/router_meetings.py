"""Appointments of `kvferry route --push`: a producer and a consumer are asked at once, and the
producer writes while it prefills.

Where a producer is, and which of its boots, its answers say: the first request after a start goes
one after the other, as without `--push`. Whoever signs appointments must have the engines' secret.
"""

from typing import Any

from kvferry.cli.router_fleet import Engine
from kvferry.clock import Clock
from kvferry.transfer.params import ID_BYTES, Offer, appoint, read


class Meetings:
    """Of one router. Its event loop only."""

    def __init__(self, secret: bytes, clock: Clock):
        self._secret = secret
        self._clock = clock
        self._known: dict[Engine, Offer] = {}

    def learn(self, engine: Engine, params: Any) -> None:
        """What a producer has answered; of another secret it teaches nothing."""
        offer, _ = read(self._secret, params)
        if offer is not None:
            self._known[engine] = offer

    def forget(self, engine: Engine) -> None:
        """It failed: it may be another boot next time."""
        self._known.pop(engine, None)

    def appoint(self, engine: Engine) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Parameters for it and for a consumer; None if it is not known."""
        offer = self._known.get(engine)
        if offer is None:
            return None
        return appoint(self._secret, offer, self._clock.random_bytes(ID_BYTES))
