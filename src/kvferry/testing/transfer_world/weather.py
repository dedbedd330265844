"""What lies between two engines, and the clock of each."""

from collections import Counter

from kvferry.errors import Error, IncompatibleError, UnavailableError
from kvferry.testing.clock import Chance, ManualClock
from kvferry.testing.world.checks import SimClock
from kvferry.transfer.compatibility import agree
from kvferry.transfer.handshake import Introduction
from kvferry.transfer.lease import CLOCK_DRIFT_MAX
from kvferry.transfer.memory import Fabric, MemoryLink, Motion
from kvferry.transfer.params import Offer
from kvferry.transfer.session import Dialled


class EngineClock(SimClock):
    """One engine's view of time: another origin and another rate than all others."""

    def __init__(self, true: ManualClock, chance: Chance):
        super().__init__(chance.randrange(1 << 60))
        self._true = true
        self._origin_s = chance.choice([0.0, 5e3, 1e6]) - true.now_s()
        self._rate = 1 + chance.choice([-1, 0, 1]) * CLOCK_DRIFT_MAX / 2.1

    def now_s(self) -> float:
        return (self._true.now_s() + self._origin_s) * self._rate


class Weather:
    """A schedule of the fabric. `paused`: ends whose process stands still, until which moment;
    `frozen`: those that never go on, alive as they are. `slow_readers`: whose reads get nowhere,
    until which moment."""

    def __init__(self, true: ManualClock, chance: Chance, counts: Counter):
        self._true = true
        self._chance = chance
        self._counts = counts
        self.paused: dict[str, float] = {}
        self.frozen: set[str] = set()
        self.slow_posters: dict[str, float] = {}
        self.is_calm = False
        self.losses = 0.15
        self._loss = chance.choice([0.0, 0.05, 0.3])
        self._slowness = chance.choice([5, 5, 60])

    def stands_still(self, name: str) -> bool:
        if name in self.frozen:
            return True
        return not self.is_calm and self.paused.get(name, 0.0) > self._true.now_s()

    def moves(self, poster: str, peer: str) -> Motion:
        if self.stands_still(peer):
            return Motion.WAIT
        if not self.is_calm and self.slow_posters.get(poster, 0.0) > self._true.now_s():
            return Motion.WAIT
        if self.is_calm:
            return Motion.END
        weights = [self._slowness, 3, 1, 6, self.losses]
        motion = self._chance.choices(list(Motion), weights)[0]
        self._counts[f"read {motion.value}"] += 1
        return motion

    def strays(self, has_rival: bool) -> bool:
        """Mostly where it does harm."""
        return self._chance.random() < (0.2 if has_rival else 0.001)

    def letters(self, sender: str, receiver: str) -> int | None:
        if receiver in self.frozen:
            return 0
        if self.stands_still(receiver):
            return None
        draw = self._chance.random()
        if self.is_calm:
            return 1
        if draw < self._loss:
            self._counts["message lost"] += 1
            return 0
        if draw < self._loss + 0.1:
            self._counts["message doubled"] += 1
            return 2
        return 1 if draw < 0.7 else None


class WorldLink(MemoryLink):
    """Knows when it is used by an engine's scheduler, which it must not be."""

    def __init__(self, fabric: Fabric, clock: EngineClock):
        super().__init__(fabric, clock)
        self._world_clock = clock

    def poll(self):
        self._world_clock.require_background("a poll of the link")
        return super().poll()

    def post(self, *arguments):
        self._world_clock.require_background("a post")
        return super().post(*arguments)

    def notify(self, *arguments):
        self._world_clock.require_background("a message")
        return super().notify(*arguments)


class WorldDialer:
    """Handshakes without sockets: answered later, or not. `listeners`: by port, what is there."""

    def __init__(self, listeners: dict, compatibility, chance: Chance, weather: Weather):
        self._listeners = listeners
        self._compatibility = compatibility
        self._chance = chance
        self._weather = weather
        self._waiting: list[Offer] = []

    def submit(self, offer: Offer) -> None:
        self._waiting.append(offer)

    def poll(self) -> list[Dialled]:
        waiting, self._waiting, results = self._waiting, [], []
        for offer in waiting:
            if not self._weather.is_calm and self._chance.random() < 0.5:
                self._waiting.append(offer)
            else:
                results.append((offer.boot, self._dial(offer)))
        return results

    def _dial(self, offer: Offer) -> Introduction | Error:
        producer = self._listeners.get(offer.port)
        if producer is None or (not self._weather.is_calm and self._chance.random() < 0.05):
            return UnavailableError("transfer.dial", "nobody answers")
        if producer.boot != offer.boot:
            return UnavailableError("transfer.boot", "another boot")
        try:
            agree(self._compatibility, producer.compatibility)
        except IncompatibleError as error:
            return error
        return producer.introduction()
