"""Who does what next: producers, consumers, movers, clients and faults, by seed."""

from collections import Counter, deque

from kvferry.keys import namespace_digest
from kvferry.testing.clock import Chance, ManualClock
from kvferry.testing.kv_memory import draw_models, draw_shape
from kvferry.testing.transfer_world.consuming import ConsumerEngine, Phase, Request
from kvferry.testing.transfer_world.producing import ProducerEngine, Prompt
from kvferry.testing.transfer_world.weather import EngineClock, Weather, WorldDialer
from kvferry.testing.world.checks import Failed
from kvferry.transfer.compatibility import Compatibility
from kvferry.transfer.memory import Fabric
from kvferry.transfer.params import FIELD
from kvferry.transfer.settings import Settings

SECRET = b"0123456789abcdef"
BLOCKS = 40
PROMPT_TOKENS_MAX = 40
REQUESTS_MAX = 6
ROUNDS_MAX = 3_000
OFFERS_MAX = 8


class World:
    """`steps` small things happen in `run`, then faults stop and everything must come to rest.
    `counts`: what happened. Raises Failed."""

    def __init__(self, seed: int):
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.events: deque[str] = deque(maxlen=60)
        chance = self._chance = Chance(f"transfer world {seed}")
        self._true = ManualClock(seed)
        self._weather = Weather(self._true, chance, self.counts)
        self._fabric = Fabric(self._weather)
        self._models = draw_models(chance)
        self._opaque_tokens = chance.choice([2, 4])
        self._namespace = namespace_digest({"model": "m"})
        self._compatibility = Compatibility({"model": "m"})
        self._documents = [
            Prompt(f"document {n}", self._tokens(), chance.choice([b"", b"salt"])) for n in range(3)
        ]
        self._settings = self._draw_settings()
        self._fault_chance = chance.choice([0.0, 0.004, 0.02])
        self._gone: list = []
        self._offers: deque[tuple[Prompt, dict]] = deque(maxlen=OFFERS_MAX)
        self._listeners: dict[int, ProducerEngine] = {}
        self._request_count = 0
        self._step_count = 0
        self._consumer_count = 0
        for port in range(chance.choice([1, 1, 2])):
            self._listeners[port] = self._start_producer(port)
        self.consumers = [self._start_consumer() for _ in range(chance.choice([1, 2]))]

    PRODUCER: type[ProducerEngine] = ProducerEngine

    def _draw_settings(self) -> Settings:
        chance = self._chance
        return Settings(
            secret=SECRET,
            lease_s=chance.choice([0.3, 1.0]),
            lease_total_s=chance.choice([1.0, 4.0]),
            leased_blocks_max=chance.choice([30, 1000, 1000]),
            early_s=0.1,
            staging_bytes=chance.choice([4, 12]) * 8192,
            slot_bytes=8192,
            quarantine_bytes_max=chance.choice([1, 4]) * 8192,
            claim_deadline_s=chance.choice([0.5, 3.0, 3.0]),
            read_deadline_s=chance.choice([0.3, 2.0, 2.0]),
            rest_s=0.2,
            peer_idle_s=3.0,
            redial_s=0.05,
            tokens_min=chance.choice([1, 6]),
        )

    def _tokens(self) -> tuple[int, ...]:
        return tuple(self._chance.randrange(50_000) for _ in range(PROMPT_TOKENS_MAX))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()
        self._calm()
        self._rest()

    def note(self, event: str) -> None:
        self.events.append(f"{self._step_count} {self._true.now_s() - 1000:.4f}s {event}")

    @property
    def _producers(self) -> list[ProducerEngine]:
        return list(self._listeners.values())

    def _start_producer(self, port: int) -> ProducerEngine:
        return self.PRODUCER(
            port,
            self._models,
            draw_shape(self._chance, self._models, self._opaque_tokens, BLOCKS),
            self._settings,
            EngineClock(self._true, self._chance),
            self._chance,
            self._fabric,
            self._weather,
            self._compatibility,
            self._namespace,
            self.counts,
        )

    def _start_consumer(self) -> ConsumerEngine:
        self._consumer_count += 1
        return ConsumerEngine(
            f"consumer {self._consumer_count}",
            self._models,
            draw_shape(self._chance, self._models, self._opaque_tokens, BLOCKS),
            self._settings,
            EngineClock(self._true, self._chance),
            self._chance,
            self._fabric,
            self._weather,
            lambda: WorldDialer(self._listeners, self._compatibility, self._chance, self._weather),
            self._namespace,
            self.counts,
        )

    # Before calm

    def _step(self) -> None:
        self._step_count += 1
        self._true.advance(self._chance.choice([0, 0, 0.0005, 0.002]))
        producer = self._chance.choice(self._producers)
        consumer = self._chance.choice(self.consumers)
        loading = [c for c in self.consumers if c.is_loading]
        draw = self._chance.random()
        if draw < 0.15:
            self._act(producer, producer.advance)
        elif draw < 0.35:
            self._move(producer)
        elif draw < 0.5:
            self._act(consumer, consumer.advance)
        elif draw < 0.84:
            self._act(consumer, consumer.runner.step)
            self._move(consumer)
        elif draw < 0.93:
            self._client(producer, consumer)
        elif draw < 0.93 + self._fault_chance:
            self._fault(producer, self._chance.choice(loading or [consumer]))

    def _act(self, engine, action) -> None:
        if not engine.stands_still:
            action()

    def _move(self, engine) -> None:
        for mover in engine.movers:
            if self._chance.random() < 0.7:
                self._act(engine, mover.step)

    def _client(self, producer: ProducerEngine, consumer: ConsumerEngine) -> None:
        chance = self._chance
        if consumer.requests and chance.random() < 0.15:
            living = [r for r in consumer.requests if not r.is_gone]
            living = [r for r in living if r.phase is Phase.LOADING] or living
            if living:
                request = chance.choice(living)
                self.note(f"{consumer.name}: abort {request.request_id}, {request.phase.value}")
                consumer.abort(request)
            return
        if len(consumer.requests) >= REQUESTS_MAX or producer.stands_still:
            return
        if (not self._offers or chance.random() < 0.7) and not self._prefill(producer):
            return
        prompt, params = chance.choice(self._offers) if chance.random() < 0.3 else self._offers[-1]
        for _ in range(chance.choice([1, 1, 1, 4])):
            self._ask(chance.choice([consumer, *self.consumers]), prompt, params)

    def _prefill(self, producer: ProducerEngine) -> bool:
        """False if there is nothing to go on with."""
        prompt = self._draw_prompt()
        params = producer.prefill(prompt)
        if params is None:
            return False
        self._offers.append((prompt, params))
        if self._chance.random() < 0.1:
            self.counts["offer that nobody takes"] += 1
            return False
        return True

    def _draw_prompt(self) -> Prompt:
        document = self._chance.choice(self._documents)
        count = self._chance.randint(1, PROMPT_TOKENS_MAX - 4)
        return Prompt(document.text, document.tokens[:count], document.extras)

    def _ask(self, consumer: ConsumerEngine, prompt: Prompt, params: dict) -> None:
        """An honest client, or one of the others."""
        chance = self._chance
        kind = chance.choice(
            ["honest"] * 8 + ["longer", "other text", "salt", "forged", "unsigned"]
        )
        self.counts[f"client {kind}"] += 1
        if kind == "longer":
            document = next(d for d in self._documents if d.text == prompt.text)
            prompt = Prompt(prompt.text, document.tokens[: len(prompt.tokens) + 4], prompt.extras)
        elif kind == "other text":
            prompt = Prompt("other", self._tokens()[: len(prompt.tokens)], prompt.extras)
        elif kind == "salt":
            prompt = Prompt(prompt.text, prompt.tokens, prompt.extras + b"x")
        elif kind == "forged":
            at = chance.randrange(len(params[FIELD]))
            letter = "A" if params[FIELD][at] != "A" else "B"
            params = params | {FIELD: params[FIELD][:at] + letter + params[FIELD][at + 1 :]}
        elif kind == "unsigned":
            params = {"do_remote_prefill": True, "remote_host": "x", "remote_block_ids": [[1]]}
        self._request_count += 1
        request = Request(
            f"request {self._request_count}",
            prompt,
            params,
            kind in ("honest", "longer"),
            steps_left=chance.choice([1, 3, 10]),
        )
        self.note(f"{consumer.name}: {request.request_id}, {kind}, {len(prompt.tokens)} tokens")
        consumer.add(request)

    def _fault(self, producer: ProducerEngine, consumer: ConsumerEngine) -> None:
        chance = self._chance
        is_loading = consumer.is_loading
        until_s = self._true.now_s() + chance.choice([0.1, 0.5, 1.5])
        kinds = ["pause producer", "pause consumer", "absence", "absence", "jump", "cut", "junk"]
        kinds = [*kinds, "slow reads", "slow reads"] * 3
        rare = ["restart producer", "restart consumer"]
        kind = chance.choice([*kinds, *rare, *(["freeze producer"] * (4 if is_loading else 1))])
        self.counts[kind] += 1
        self.note(kind)
        if kind == "pause producer":
            producer.pause(until_s)
        elif kind == "pause consumer":
            consumer.pause(until_s)
        elif kind == "slow reads":
            self._slow_down(consumer, until_s)
        elif kind == "absence":
            self._be_absent(producer, consumer)
        elif kind == "jump":
            self._true.advance(chance.choice([0.05, 0.3, 0.3, 1.2]))
        elif kind == "cut":
            ends = chance.choice(producer.links), chance.choice(consumer.links)
            self._fabric.cut(*(link.name for link in ends))
        elif kind == "junk":
            link = chance.choice([*producer.links, *consumer.links])
            self._fabric.send("stranger", link.name, chance.randbytes(chance.choice([0, 9, 200])))
        elif kind in ("restart producer", "freeze producer"):
            if kind == "restart producer":
                self._stop(producer.links)
            self._weather.frozen.update(link.name for link in producer.links)
            self._gone.append(producer)
            self._listeners[producer.port] = self._start_producer(producer.port)
        else:
            self._stop(consumer.links)
            self._gone.append(consumer)
            self.consumers.remove(consumer)
            self.consumers.append(self._start_consumer())

    def _slow_down(self, consumer: ConsumerEngine, until_s: float) -> None:
        self._weather.slow_posters.update({link.name: until_s for link in consumer.links})

    def _be_absent(self, producer: ProducerEngine, consumer: ConsumerEngine) -> None:
        """A consumer does nothing for longer than a lease (it compiles), its reads go on, slowly,
        and the producer uses the blocks again."""
        now_s, lease_s = self._true.now_s(), self._settings.lease_s
        consumer.pause(now_s + lease_s * 1.4)
        if self._chance.random() < 0.7:
            self._slow_down(consumer, now_s + lease_s * 1.25)
        for _ in range(16):
            self._true.advance(self._settings.lease_s / 10)
            for mover in producer.movers:
                self._act(producer, mover.step)
            self._act(producer, producer.advance)

    def _stop(self, links) -> None:
        for link in links:
            link.close(0.0)

    # Calm and rest

    def _calm(self) -> None:
        """Faults stop; everything that began must end."""
        self.note("calm")
        self._weather.is_calm = True
        for _ in range(ROUNDS_MAX):
            if self._is_at_rest():
                return
            self._round()
        busy = [e for e in (*self._producers, *self.consumers) if not e.is_idle]
        raise Failed("d", f"{[type(e).__name__ for e in busy]} did not come to rest")

    def _is_at_rest(self) -> bool:
        return all(engine.is_idle for engine in (*self._producers, *self.consumers))

    def _round(self) -> None:
        self._true.advance(0.005)
        for engine in (*self._producers, *self.consumers):
            engine.advance()
            for mover in engine.movers:
                mover.step()
        for consumer in self.consumers:
            consumer.runner.step()

    def _rest(self) -> None:
        for engine in (*self._producers, *self.consumers):
            engine.check_rest()
        for consumer in self.consumers:
            consumer.close()
        for producer in self._producers:
            producer.close()
        for engine in (*self._producers, *self.consumers, *self._gone):
            self.counts.update(engine.tally)
