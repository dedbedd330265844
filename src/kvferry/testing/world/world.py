"""Who does what next: engines, movers, runners, clients, operators and faults, by seed."""

from collections import Counter, deque
from collections.abc import Callable

from kvferry.metrics import merge
from kvferry.testing.clock import Chance
from kvferry.testing.world.checks import Failed, SimClock
from kvferry.testing.world.engine import Engine
from kvferry.testing.world.requests import VOCABULARY, SimRequest
from kvferry.testing.world.shape import (
    ANSWER_TOKENS_MAX,
    PROMPT_TOKENS_MAX,
    draw_model,
    draw_setup,
    draw_tenancy,
)
from kvferry.testing.world.storage import MakeDisk, MemoryDisk, Storage

REQUESTS_MAX = 10
"""Of one engine at a time."""
ROUNDS_MAX = 3000
"""Checker (d): in so many rounds everything must have ended once faults have stopped. Most worlds
need 350. (When the scheduler here let loads in without room for the rest of their requests, and
took blocks back from those who waited, neither of which vLLM does, some needed 6,000: three that
were loaded, took one another's blocks, and began again, every 750 rounds.)"""


class World:
    """`steps` small things happen in `run`, then faults stop and everything must come to rest.
    `counts`: what happened, to show that a run was worth it. Raises Failed."""

    def __init__(self, seed: int, make_disk: MakeDisk = MemoryDisk):
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.events: deque[str] = deque(maxlen=60)
        self._chance = Chance(f"world {seed}")
        self._clock = SimClock(seed)
        self._model = draw_model(self._chance)
        self._tenancy = draw_tenancy(Chance(f"tenancy {seed}"), self._chance.choice([4, 10, 40]))
        self.storage = Storage(self._model, self._clock, self._chance, self._tenancy, make_disk)
        self._documents = [
            [self._chance.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS_MAX)]
            for _ in range(self._chance.choice([1, 2, 4]))
        ]
        self._request_count = 0
        self._engine_count = 0
        self._step_count = 0
        self._paused: dict[Callable, int] = {}
        self._gone: list[Engine] = []
        self.engines: list[Engine] = []
        for _ in range(self._chance.choice([1, 2, 2, 3])):
            self._start_engine()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()
        self._calm()
        self._rest()

    def note(self, event: str) -> None:
        self.events.append(f"{self._step_count} {self._clock.now_s() - 1000:.4f}s {event}")

    # Before calm

    def _step(self) -> None:
        self._step_count += 1
        self._clock.advance(self._chance.choice([0, 0, 0.0002, 0.001]))
        engine = self._chance.choice(self.engines)
        draw = self._chance.random()
        if draw < 0.42:
            self._act(engine.advance)
        elif draw < 0.64:
            self._act(self._chance.choice(engine.ranks).mover.step)
        elif draw < 0.77:
            self._act(self._chance.choice(engine.ranks).runner.step)
        elif draw < 0.92:
            self._act(engine.runner.step)
            self._act(engine.files.step)
        elif draw < 0.94:
            engine.end_sibling_load()
        elif draw < 0.985:
            self._client(engine)
        elif draw < 0.990:
            self._pause(engine)
        elif draw < 0.995:
            self._operate(engine)

    def _act(self, action: Callable) -> None:
        """One step of somebody, unless he hangs."""
        if self._paused.get(action, 0) <= self._step_count:
            action()

    def _pause(self, engine: Engine) -> None:
        """Somebody hangs for a while, or time passes by."""
        ranks = engine.ranks
        candidates = [engine.advance, engine.runner.step, engine.files.step]
        candidates += [rank.mover.step for rank in ranks] + [rank.runner.step for rank in ranks]
        if self._chance.random() < 0.25:
            self._clock.advance(self._chance.choice([0.01, 0.1, 0.5]))
            self.counts["time_jump"] += 1
            return
        action = self._chance.choice(candidates)
        self._paused[action] = self._step_count + self._chance.choice([30, 100, 300])
        self.counts["pause"] += 1
        self.note(f"{engine.name}: {action.__qualname__} hangs")

    def _client(self, engine: Engine) -> None:
        requests = engine.scheduler.living
        if requests and self._chance.random() < 0.15:
            request = self._chance.choice(requests)
            self.note(f"{engine.name}: abort {request.request_id}")
            engine.abort(request)
        elif len(requests) < REQUESTS_MAX:
            request = self._new_request()
            self.note(f"{engine.name}: {request.request_id}, {request.prompt_count} tokens")
            engine.add(request)

    def _new_request(self) -> SimRequest:
        chance = self._chance
        self._request_count += 1
        document = chance.choice(self._documents)
        shared = chance.choice([0, 8, 16, 31, 32, 33, 48, 64, chance.randrange(64)])
        tail = [chance.randrange(VOCABULARY) for _ in range(chance.choice([0, 1, 8]))]
        prompt = (document[:shared] + tail) or document[:1]
        request = SimRequest(
            f"request {self._request_count}",
            prompt,
            chance.choice([1, 2, 8, ANSWER_TOKENS_MAX]),
            chance.choice([b"", b"", b"", b"salt"]),
        )
        known = chance.random()
        request.is_cacheable, request.can_be_named = known > 0.03, known > 0.06
        request.is_readable = chance.random() > 0.03
        return request

    def _operate(self, engine: Engine) -> None:
        storage = self.storage
        actions = {
            "crash": lambda: self._crash(engine),
            "reset": lambda: self._reset(engine),
            "lose catalog": storage.lose_catalog,
            "save catalog": storage.save_catalog,
            "restore catalog": storage.restore_catalog,
            "fill disk": storage.fill_disk,
            "free disk": storage.free_disk,
            "release pages": self._release,
            "damage": storage.damage,
        }
        common = ["damage", "damage", "damage", "reset", "release pages", "save catalog"]
        name = self._chance.choice([*actions, *common])
        self.counts[name] += 1
        self.note(f"{engine.name}: {name}")
        actions[name]()

    def _reset(self, engine: Engine) -> None:
        """Of an engine that loads, if there is one: what is under way must not be taken."""
        loading = [other for other in self.engines if other.scheduler.is_loading]
        mode = self._chance.choice(["restart", "mix", "stale"])
        self._chance.choice(loading or [engine]).reset(mode)

    def _release(self) -> None:
        for pages in self.storage.all_pages:
            pages.release()

    def _crash(self, engine: Engine) -> None:
        """The process is gone at this very point, its memory too; another one starts."""
        for rank in engine.ranks:
            if self._chance.random() < 0.5:
                rank.pages.poll()  # what was on its way still arrives
        engine.die()
        self.engines.remove(engine)
        self._gone.append(engine)
        self._start_engine()

    def _start_engine(self) -> None:
        self._engine_count += 1
        tenants = self._tenancy.tenants
        tenant = tenants[self._engine_count % len(tenants)]
        setup = draw_setup(self._chance, self._model, tenant)
        self.engines.append(
            Engine(
                f"engine {self._engine_count}",
                setup,
                self.storage,
                self._clock,
                self._chance,
                self.counts,
            )
        )

    # Calm and rest

    def _calm(self) -> None:
        """Faults stop; everything that began must end."""
        self.note("calm")
        self.storage.calm()
        self._paused.clear()
        for engine in self.engines:
            engine.calm()
        for _ in range(ROUNDS_MAX):
            if all(engine.is_idle for engine in self.engines):
                return
            self._round()
        busy = [engine.name for engine in self.engines if not engine.is_idle]
        raise Failed("d", f"{busy} did not come to rest")

    def _round(self) -> None:
        self._clock.advance(0.002)
        for engine in self.engines:
            engine.advance()
            engine.runner.step()
            engine.files.step()
            engine.end_sibling_load()
            for rank in engine.ranks:
                rank.mover.step()
                rank.runner.step()

    def _rest(self) -> None:
        for engine in self.engines:
            engine.check_rest()
        self.counts["proven_slices"] = self.storage.check_pages()
        self.storage.check_catalog()
        self.counts["published"] = len(self.storage.catalog.snapshot().pages)
        for engine in self.engines:
            engine.close()
        self._clock.advance(2.0)
        self.storage.catalog.sweep()
        reserved = self.storage.catalog.snapshot().reserved
        if reserved:
            raise Failed("c", f"reserved after all leases have ended: {reserved}")
        self._count()

    def _count(self) -> None:
        """Adds what metrics and faults have counted."""
        engines = [*self.engines, *self._gone]
        halves = [e.metrics for e in engines] + [r.metrics for e in engines for r in e.ranks]
        for name, values in merge(m.snapshot() for m in halves).items():
            for labels, value in values.items():
                if not isinstance(value, list):
                    self.counts[f"{name}{{{labels}}}" if labels else name] += value
        fences = merge(m.snapshot() for m in halves).get("kvferry_fence_wait_seconds", {})
        self.counts["fences"] += sum(count for count, _ in fences.get("", []))
        for wrapper in (*self.storage.all_pages, *self.storage.all_catalogs):
            for fault, count in wrapper.fired.items():
                self.counts[f"{type(fault).__name__}.{fault.name}"] += count
