"""What benchmarks with real engines share: plan, engines, prompts, store."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any

import msgspec

from kvferry.cli import output, shapes
from kvferry.cli.engine_process import ANSWER_S, EngineProcess
from kvferry.cli.opened import open_store
from kvferry.cli.shapes import Shape
from kvferry.clock import Clock
from kvferry.config import decode
from kvferry.errors import ConfigError
from kvferry.layout import default_chunk_tokens

MODES = ("eager", "graphs", "compiled")
"""Nothing captured or compiled; CUDA graphs of decode steps; what vLLM does by default."""
REST_TOKENS = 8
"""What a prompt has beyond its full chunks."""
MODEL_SPARE_TOKENS = 64
CAPACITY_BYTES_MIN = 256 << 20
PATIENCE_S = 30.0
POLL_S = 0.05
READY_S = 1.0
"""After which an engine that stores has slots in reserve."""


@dataclass(frozen=True)
class Plan:
    """`folder`: empty, the caller's. `settings`: more of `LLM`'s arguments; `options`: more of
    kvferry's."""

    folder: Path
    shape_name: str
    is_seeded: bool
    mode: str
    token_counts: Sequence[int]
    prompt_count: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        return shapes.shape_of(self.shape_name)


def parse_plan(
    folder: str, shape: str, lengths: str, prompt_count: int, mode: str, settings: str, options: str
) -> Plan:
    """From the words of a command line. Raises ConfigError."""
    if mode not in MODES:
        raise ConfigError("bench.mode", f"--mode: {', '.join(MODES)}, and not {mode!r}")
    shapes.shape_of(shape)
    token_counts = parse_lengths(lengths)
    more = [_object(name, text) for name, text in (("settings", settings), ("ferry", options))]
    return Plan(Path(folder), shape, True, mode, token_counts, prompt_count, *more)


def parse_lengths(lengths: str) -> tuple[int, ...]:
    """Numbers of tokens. Raises ConfigError."""
    try:
        return tuple(int(length) for length in lengths.split(","))
    except ValueError:
        raise ConfigError(
            "bench.lengths", f"--lengths: such as 1000,5000, not {lengths!r}"
        ) from None


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError("bench.json", f"--{name}: a JSON object, please ({error})") from None


@dataclass
class Engines:
    """Opens engines of one model, one after the other. `facts`: of the one opened last."""

    plan: Plan
    clock: Clock
    facts: dict[str, Any] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        return self.plan.folder / "model"

    @contextmanager
    def opened(
        self, name: str, transfer: Any = None, answer_s: float = ANSWER_S, **pretended: float
    ) -> Iterator[EngineProcess]:
        """`pretended`: rates of a slow disk, as of `MeasuredEngine.open`."""
        if not self.model.exists():
            shapes.save(self.plan.shape, self.model)
        engine = EngineProcess(self.plan.folder / f"{name}.log", self.clock, answer_s)
        engine.start()
        try:
            self.facts = engine.call(
                "open",
                model=str(self.model),
                mode=self.plan.mode,
                load_format="seeded" if self.plan.is_seeded else "dummy",
                settings={
                    "max_model_len": max(self.plan.token_counts) + MODEL_SPARE_TOKENS,
                    "max_num_seqs": 32,
                    **self.plan.settings,
                    "kv_transfer_config": transfer,
                },
                **pretended,
            )
            self.start_s[name] = self.facts.pop("start_s")
            output.complain(f"{name}: the engine is up after {self.start_s[name]} s")
            yield engine
        finally:
            engine.close()


@dataclass(frozen=True)
class Prompts:
    """What is asked, in the order of asking. `chunk_tokens`: of the store."""

    plan: Plan
    chunk_tokens: int

    def loadable(self, token_count: int) -> int:
        """Tokens in full chunks of a prompt that is asked to have so many."""
        return token_count // self.chunk_tokens * self.chunk_tokens

    def length(self, token_count: int) -> int:
        return self.loadable(token_count) + REST_TOKENS

    def one(self, token_count: int, name: Any) -> list[int]:
        return shapes.prompt(self.plan.shape, self.length(token_count), str(name))

    def all(self) -> Iterator[tuple[int, list[int]]]:
        for token_count in self.plan.token_counts:
            for index in range(self.plan.prompt_count):
                yield token_count, self.one(token_count, index)

    def stored_tokens(self) -> int:
        """With those that warm up."""
        return (1 + self.plan.prompt_count) * sum(map(self.loadable, self.plan.token_counts))

    def warm_up(self, engine: EngineProcess) -> None:
        """Each length twice: as it comes, and as a hit."""
        for token_count in self.plan.token_counts:
            engine.call("ask", prompts=2 * [self.one(token_count, "warm-up")])


def token_bytes(plan: Plan, facts: Mapping[str, Any]) -> int:
    """Of KV cache: one token. `facts`: of an opened engine."""
    return plan.shape.token_bytes(facts["element_bytes"])


def chunk_tokens(plan: Plan, facts: Mapping[str, Any]) -> int:
    """Of the store, as kvferry chooses it. Raises ConfigError if a prompt is shorter."""
    slice_bytes = plan.shape.token_slice_bytes(facts["element_bytes"])
    chosen = default_chunk_tokens(slice_bytes, facts["block_tokens"])
    found = plan.options.get("chunk_tokens", chosen)
    if min(plan.token_counts) < found:
        raise ConfigError("bench.length", f"--lengths: at least a chunk, {found} tokens")
    return found


def store_options(plan: Plan, content_bytes: int) -> dict[str, Any]:
    """All loads are taken, and there is ample room for `content_bytes`: a prompt gets at most a
    quarter of the slots ahead."""
    return {
        "capacity_bytes": max(4 * content_bytes, CAPACITY_BYTES_MIN),
        "model_id": f"{plan.shape_name} {'seeded' if plan.is_seeded else 'dummy'}",
        "cost_model": False,
        **plan.options,
    }


class Store:
    """One store of kvferry below `folder`."""

    def __init__(self, folder: Path, clock: Clock, options: Mapping[str, Any]):
        self._clock = clock
        self._folder = folder
        self._options = {
            "pages": f"posix://{folder}/pages",
            "catalog": f"lmdb://{folder}/catalog",
            **options,
        }

    @property
    def transfer(self) -> dict[str, Any]:
        return {
            "kv_connector": "FerryStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": self._options,
        }

    def page_count(self) -> int:
        names = ("pages", "catalog")
        with open_store(decode({name: self._options[name] for name in names})) as opened:
            return sum(space.page_count for space in opened.catalog.stats().spaces)

    def wait_for(self, page_count: int) -> int:
        """Until there are so many pages, but not for ever; how many there are."""
        give_up_s = self._clock.now_s() + PATIENCE_S
        while (found := self.page_count()) < page_count and self._clock.now_s() < give_up_s:
            self._clock.sleep(POLL_S)
        return found

    def rest(self) -> int:
        """Until no page is added any more; how many there are."""
        found = -1
        while (now := self.page_count()) != found:
            found = now
            self._clock.sleep(READY_S)
        return found

    def remove(self) -> None:
        rmtree(self._folder)
