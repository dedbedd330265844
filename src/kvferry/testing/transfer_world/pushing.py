"""The same world where producers push: prefills take steps, are preempted and aborted while their
pages are gathered and written, and consumers come before, during and after.

`python -m kvferry.testing.transfer_world.pushing --seed 7` replays a run.
"""

import sys
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.testing import replay
from kvferry.testing.transfer_world.consuming import ConsumerEngine, Request
from kvferry.testing.transfer_world.producing import Held, ProducerEngine, Prompt
from kvferry.testing.transfer_world.world import World
from kvferry.transfer.halves import ProducerPlan
from kvferry.transfer.params import Offer, appoint
from kvferry.transfer.producer import Prefix
from kvferry.transfer.settings import Settings

SLOT_BYTES = 1 << 15
RUNNING_MAX = 4


@dataclass(eq=False)
class Running:
    """A prefill. `tables`: None while it has no blocks. `takes_offer`: what becomes of what its
    client is given."""

    request_id: str
    prompt: Prompt
    params: dict[str, Any]
    takes_offer: bool
    tables: list[list[int]] | None = None
    computed: int = 0
    is_new: bool = True


class PushingProducer(ProducerEngine):
    """`offers`: what clients of finished prefills were given."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._running: list[Running] = []
        self._freed: list[list[list[int]]] = []
        self.offers: list[tuple[Prompt, dict]] = []

    @property
    def running_count(self) -> int:
        return len(self._running)

    def start(self, prompt: Prompt, params: dict[str, Any], takes_offer: bool) -> None:
        self._request_count += 1
        request_id = f"prefill {self._request_count}"
        self._running.append(Running(request_id, prompt, params, takes_offer))
        with self._clock.scheduling():
            self.producer.appointed(request_id, params, Prefix(prompt.tokens, prompt.extras))

    def abort(self) -> None:
        """The client of some prefill hangs up: its blocks are free at once."""
        if self._running:
            running = self._chance.choice(self._running)
            self._counts[f"abort prefill {'new' if running.is_new else 'running'}"] += 1
            self._leave(running)
            self.producer.cancel(running.request_id)

    def advance(self) -> None:
        """One step of the engine: plan, what ranks do before, computing, what they do after."""
        with self._clock.scheduling():
            ends = {running: self._schedule(running) for running in self._running}
            plan = msgspec.msgpack.encode(self.producer.plan())
        for rank in self._ranks:
            with self._clock.scheduling():
                rank.begin(msgspec.msgpack.decode(plan, type=ProducerPlan))
        self._let_movers_run()
        self._compute(ends)
        self._let_movers_run()
        for number, rank in enumerate(self._ranks):
            with self._clock.scheduling():
                ended = rank.take_ended()
            for request_id in ended:
                self._ended(request_id, number)
        for running in [r for r in self._running if r.computed == len(r.prompt.tokens)]:
            self._finish(running)

    def _let_movers_run(self) -> None:
        """They do not wait for the engine."""
        for mover in self.movers:
            for _ in range(self._chance.choice([0, 1, 3])):
                mover.step()

    @property
    def is_idle(self) -> bool:
        return super().is_idle and not self._running

    def _schedule(self, running: Running) -> int:
        """How many tokens it has after this step."""
        producer, token_count = self.producer, len(running.prompt.tokens)
        is_calm = self._weather.is_calm
        if running.tables is not None and not is_calm and self._chance.random() < 0.15:
            self._counts["preempted"] += 1
            self._freed.append(running.tables)
            self._pools.give_back(running.tables)
            running.tables, running.computed = None, 0
            producer.withdraw(running.request_id)
            return 0
        if running.tables is None:
            running.tables = self._pools.take(token_count)
            if running.tables is None:
                return 0
        running.is_new = False
        end = min(
            running.computed + self._chance.choice([8, 40] if is_calm else [0, 0, 1, 3, 8, 40]),
            token_count,
        )
        tables = tuple(tuple(table) for table in running.tables)
        producer.progress(running.request_id, end, tables)
        return end

    def _compute(self, ends: dict[Running, int]) -> None:
        freed, self._freed = self._freed, []
        for groups in self.memory:
            for tables in freed:
                self._write(groups, tables, "another user's text", 1 << 40)
            for running, end in ends.items():
                if running.tables is not None:
                    self._write(groups, running.tables, "not computed yet", 1 << 40)
                    self._write(groups, running.tables, running.prompt.text, end)
        for running, end in ends.items():
            running.computed = end

    def _write(self, groups, tables: list[list[int]], text: str, end: int) -> None:
        for group, table in zip(groups, tables, strict=False):
            for index, block in enumerate(table):
                group.write(block, index, text, end)

    def _finish(self, running: Running) -> None:
        with self._clock.scheduling():
            params = self.producer.finished(
                running.request_id,
                running.params,
                Prefix(running.prompt.tokens, running.prompt.extras),
                tuple(tuple(table) for table in running.tables),
            )
        if params is None:
            self._leave(running)
            return
        self._running.remove(running)
        self._held[running.request_id] = Held(running.tables, set(range(len(self._ranks))))
        if running.takes_offer:
            self.offers.append((running.prompt, params))

    def _leave(self, running: Running) -> None:
        self._running.remove(running)
        if running.tables is not None:
            self._freed.append(running.tables)
            self._pools.give_back(running.tables)


class PushWorld(World):
    """See the module."""

    PRODUCER = PushingProducer

    def _draw_settings(self) -> Settings:
        self._weather.losses = self._chance.choice([0.15, 3])
        settings, chance = super()._draw_settings(), self._chance
        return msgspec.structs.replace(
            settings,
            direction="push",
            read_deadline_s=chance.choice([0.5, 3.0, 3.0]),
            early_s=chance.choice([0.1, 0.5]),
            rest_s=chance.choice([0.01, 0.2]),
            staging_bytes=chance.choice([4, 12]) * SLOT_BYTES,
            slot_bytes=SLOT_BYTES,
            quarantine_bytes_max=chance.choice([1, 4]) * SLOT_BYTES,
            page_tokens_max=chance.choice([1, 8, 16]),
        )

    def _client(self, producer: PushingProducer, consumer: ConsumerEngine) -> None:
        self._offers.extend(producer.offers)
        producer.offers = []
        if self._chance.random() < 0.03 and not producer.stands_still:
            producer.abort()
        super()._client(producer, consumer)

    def _prefill(self, producer: PushingProducer) -> bool:
        """Of a router that waits for the producer, or of one that asks both engines at once."""
        if producer.running_count >= RUNNING_MAX:
            return bool(self._offers)
        chance, prompt = self._chance, self._draw_prompt()
        if chance.random() < 0.3:
            producer.start(prompt, {"do_remote_decode": True}, chance.random() < 0.9)
            return bool(self._offers)
        known = Offer(b"", producer.boot, "host", producer.port, self._namespace, b"", 0)
        to_producer, to_consumer = appoint(self._settings.secret, known, chance.randbytes(16))
        kind = chance.choice(["both"] * 6 + ["no producer", "no consumer", "another prompt"])
        self.counts[f"appointment, {kind}"] += 1
        if kind != "no producer":
            producer.start(prompt, to_producer, False)
        if kind == "another prompt":
            prompt = Prompt("other", self._tokens()[: len(prompt.tokens)], prompt.extras)
        for _ in range(chance.choice([1, 1, 2]) if kind != "no consumer" else 0):
            self._request_count += 1
            consumer = chance.choice(self.consumers)
            request = Request(f"request {self._request_count}", prompt, to_consumer, True)
            self.note(f"{consumer.name}: {request.request_id}, appointment, {kind}")
            consumer.add(request)
        return False

    def _is_at_rest(self) -> bool:
        """Whose process stands still for ever keeps what it was invited to; nobody else does."""
        ranks = [rank for consumer in self.consumers for rank in consumer.ranks]
        exposed_to = set().union(*(rank.exposed_to for rank in ranks))
        return super()._is_at_rest() and exposed_to <= self._weather.frozen

    def _slow_down(self, consumer: ConsumerEngine, until_s: float) -> None:
        """Writes get nowhere."""
        links = (link.name for producer in self._producers for link in producer.links)
        self._weather.slow_posters.update(dict.fromkeys(links, until_s))


if __name__ == "__main__":
    sys.exit(replay.main("kvferry.testing.transfer_world.pushing", PushWorld))
