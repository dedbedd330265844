"""vLLM's own scheduler with our connector, without a model: what each call of ours takes there.

    python -m kvferry.cli.driven_scheduler < {"folder": ..., "requests": 256, "steps": 1000}

A process of its own, as an engine core is one: the real scheduler and block manager, the real
connector with the embedded catalog, and a made-up model that gives each request one token after
`FORWARD_S`. Between two forwards vLLM does its own work on the same thread, so our code meets the
caches that it meets in an engine. The last line of standard output is the reply: JSON, times in
microseconds.
"""

import gc
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.catalog.base import Catalog, Commit, Slot
from kvferry.catalog.lmdb import LmdbCatalog
from kvferry.cli.bench_scheduler import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    FORWARD_S,
    LOOKUP_KEYS,
    PROMPT_TOKENS,
    SETTLE_S,
    WARM_UP_STEPS,
    identity,
    options,
    prompt,
    summary,
)
from kvferry.clock import Clock, SystemClock
from kvferry.config import decode
from kvferry.offload.base import Identity, Plan, Report
from kvferry.vllm_plugin import CONNECTOR
from kvferry.vllm_plugin.messages import WorkerMetadata, encode

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1 << 20,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "float32",
}
STEP_TOKENS_MAX = 8192
ROUND_STEPS = 100
"""Steps with and without lookups take turns of so many."""
ADMISSIONS_MAX = 200
STEPS_BETWEEN = 3
ADMITTING_CALLS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
)
WRAPPED_CALLS = 10_000


class Stopwatch:
    """Measures calls of an object's methods, by name. One thread."""

    def __init__(self, clock: Clock):
        self._now_s = clock.now_s
        self._spent: list[tuple[str, float]] = []

    def watch(self, target: Any) -> None:
        """From now on each public method of `target` that kvferry wrote is measured."""
        for name in dir(target):
            method = getattr(target, name)
            written_in = getattr(method, "__module__", None) or ""
            if not name.startswith("_") and callable(method) and written_in.startswith("kvferry."):
                setattr(target, name, self.timed(name, method))

    def timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method`, measured under this name."""
        now_s, note = self._now_s, self._spent.append

        def timed(*arguments: Any, **named: Any) -> Any:
            start_s = now_s()
            result = method(*arguments, **named)
            note((name, now_s() - start_s))
            return result

        return timed

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call."""
        spent: dict[str, float] = {}
        for name, taken_s in self._spent:
            spent[name] = spent.get(name, 0.0) + taken_s
        self._spent.clear()
        return spent


class Spent(NamedTuple):
    """One step. `schedule_s`: vLLM's `schedule`, with what it calls of us; `calls_s`: our calls
    from there to the end of `update_from_output`, by name. `store_count`: spans of chunks that
    its plan stores."""

    schedule_s: float
    calls_s: dict[str, float]
    store_count: int = 0

    @property
    def ours_s(self) -> float:
        return sum(self.calls_s.values())


class Worker:
    """What the worker's side says to the scheduler's: who it is, and that loads have ended.
    `has_to_commit`: what plans store is told to the catalog, so that it is found later.
    `load_count`: loads in the plans so far. `store_count`: stores in the last one."""

    def __init__(self, catalog: Catalog, who: Identity):
        self._catalog = catalog
        self._part = who.parts[0]
        self._reports: tuple[bytes, ...] = (encode(Report(identities=(who,))),)
        self.has_to_commit = False
        self.load_count = 0
        self.store_count = 0

    def answer(self, output: SchedulerOutput) -> KVConnectorOutput:
        plan = output.kv_connector_metadata.decode()
        if self.has_to_commit:
            self._commit(plan)
        self.load_count += len(plan.loads)
        self.store_count = len(plan.stores) + len(plan.late_stores)
        said, self._reports = self._reports, ()
        return KVConnectorOutput(
            finished_recving={load.request_id for load in plan.loads} or None,
            kv_connector_worker_meta=WorkerMetadata(said) if said else None,
        )

    def _commit(self, plan: Plan) -> None:
        chunks = [
            chunk for store in plan.stores + plan.late_stores for chunk in store.span.chunks()
        ]
        count = self._part.slice_count
        self._catalog.commit(
            self._part.namespace,
            [
                Commit(
                    chunk.key,
                    chunk.parent,
                    chunk.chunk_index,
                    Slot(chunk.address, chunk.generation),
                    0,
                    count,
                )
                for chunk in chunks
            ],
        )


class Engine:
    """An engine core without a model. `connector`: ours, measured by `stopwatch`. One thread."""

    def __init__(self, config: VllmConfig, clock: Clock):
        self._clock = clock
        self._worker: Worker | None = None
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=config.model_config.dtype
        )
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._block_hasher = get_request_block_hasher(BLOCK_TOKENS, hash_function)
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=config.cache_config.num_gpu_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self.connector = self._scheduler.connector
        self.stopwatch = Stopwatch(clock)
        self.stopwatch.watch(self.connector)

    def employ(self, worker: Worker) -> None:
        """From now on this worker answers."""
        self._worker = worker

    def add(self, request_id: str, tokens: Sequence[int], is_hashed: bool = True) -> Request:
        """A request comes in. One that is not hashed must not be admitted."""
        request = Request(
            request_id,
            tokens,
            SamplingParams(max_tokens=MODEL["max_position_embeddings"], ignore_eos=True),
            None,
            block_hasher=self._block_hasher if is_hashed else None,
        )
        self._scheduler.add_request(request)
        return request

    def finish(self, request_id: str) -> None:
        self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Spent:
        """What we spent between steps is in no step."""
        self.stopwatch.take()
        start_s = self._clock.now_s()
        output = self._scheduler.schedule()
        schedule_s = self._clock.now_s() - start_s
        result = self._forward(output)
        self._clock.sleep(FORWARD_S)
        self._scheduler.update_from_output(output, result)
        return Spent(schedule_s, self.stopwatch.take(), self._worker.store_count)

    def is_running(self, request_id: str) -> bool:
        """Whether it was admitted and its prompt is computed, or is being computed."""
        return self._scheduler.requests[request_id].status is RequestStatus.RUNNING

    def forget_prefixes(self) -> None:
        """Empties vLLM's own prefix cache; no request may be there."""
        assert self._scheduler.reset_prefix_cache()

    def close(self) -> None:
        self._scheduler.shutdown()

    def _forward(self, output: SchedulerOutput) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        requests = [self._scheduler.requests[name] for name in names]
        token = self._scheduler.current_step
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[
                [token] if request.num_computed_tokens >= request.num_tokens else []
                for request in requests
            ],
            kv_connector_output=self._worker.answer(output),
        )


class Measurement:
    """The phases. `request_count` requests run all the time, unless one was just replaced."""

    def __init__(self, engine: Engine, worker: Worker, clock: Clock, request_count: int):
        self._engine = engine
        self._worker = worker
        self._clock = clock
        self._request_count = request_count
        self._running: deque[str] = deque()
        self._asked_count = 0
        self._arrivals_s: list[float] = []
        self._finishes_s: list[float] = []
        self._turnover_s: list[float] = []
        self._ordinary: list[Spent] = []

    def run(self, step_count: int) -> dict[str, Any]:
        engine, admission_count = self._engine, min(ADMISSIONS_MAX, max(2, step_count // 5))
        first_found = self._request_count + admission_count
        self._store_prompts(range(first_found, first_found + admission_count))
        for index in range(self._request_count):
            self._add(index)
        self._settle(self._running)
        gc.collect()
        gc.freeze()  # as vLLM does once an engine has started
        for _ in range(WARM_UP_STEPS):
            engine.step()
        quiet: list[Spent] = []
        busy: list[Spent] = []
        for first in range(0, step_count, ROUND_STEPS):
            count = min(ROUND_STEPS, step_count - first)
            quiet += [engine.step() for _ in range(count)]
            busy += self._look_up(count)
        computed = self._replace_each(range(self._request_count, first_found))
        loaded = self._replace_each(range(first_found, first_found + admission_count))
        return {
            "step_us": summary([spent.ours_s for spent in quiet]),
            "step_medians_us": _medians(quiet),
            "schedule_us": summary([spent.schedule_s for spent in quiet]),
            "admission_us": summary(computed),
            "admission_with_load_us": summary(loaded),
            "admitted_requests": admission_count,
            "loaded_requests": self._worker.load_count,
            "step_with_turnover_us": summary(
                [*self._turnover_s, *(spent.ours_s for spent in self._ordinary)]
            ),
            "arrival_us": summary(self._arrivals_s),
            "finish_us": summary(self._finishes_s),
            "lookup_keys": LOOKUP_KEYS,
            "lookups": self._asked_count,
            "step_during_lookups_us": summary([spent.ours_s for spent in busy]),
            "schedule_during_lookups_us": summary([spent.schedule_s for spent in busy]),
            "wrapping_us": summary(self._wrapping()),
        }

    def _add(self, index: int) -> str:
        name = f"request {index}"
        self._engine.add(name, prompt(index))
        self._running.append(name)
        return name

    def _store_prompts(self, indices: Iterable[int]) -> None:
        """Prompts that will be found later: they are computed, stored and forgotten by vLLM."""
        self._worker.has_to_commit = True
        for index in indices:
            name = self._add(index)
            self._settle([name])
            self._engine.finish(self._running.pop())
        self._engine.step()
        self._worker.has_to_commit = False
        self._engine.forget_prefixes()

    def _settle(self, names: Iterable[str]) -> None:
        """Steps until all of these decode."""
        deadline_s = self._clock.now_s() + SETTLE_S
        while not all(map(self._engine.is_running, names)):
            self._engine.step()
            assert self._clock.now_s() < deadline_s
        self._engine.step()

    def _look_up(self, step_count: int) -> list[Spent]:
        """As soon as one long prompt has its answer, or is late, the next one asks. The engine is
        full, so vLLM does not ask for the answer: that is done here, and counted."""
        engine, spent = self._engine, []
        tokens = list(range(LOOKUP_KEYS * CHUNK_TOKENS))
        long: Request | None = None
        for _ in range(step_count):
            if long is None:
                self._asked_count += 1
                tokens[0] = self._asked_count
                long = engine.add(f"long {self._asked_count}", tokens, is_hashed=False)
            step = engine.step()
            found, _ = engine.connector.get_num_new_matched_tokens(long, 0)
            spent.append(Spent(step.schedule_s, step.calls_s | engine.stopwatch.take()))
            if found is not None:
                engine.finish(long.request_id)
                long = None
        if long is not None:
            engine.finish(long.request_id)
        return spent

    def _replace_each(self, indices: Iterable[int]) -> list[float]:
        """One running request after the other is replaced. Of each new one: what its calls took
        in the steps that admitted it, and how much longer their plans took than those of steps in
        which nobody came and that stored something, or nothing, alike."""
        admissions: list[list[Spent]] = []
        for index in indices:
            admissions.append(self._replace(index))
            self._ordinary += [self._engine.step() for _ in range(STEPS_BETWEEN)]
        plan_s = {
            has_stores: median(
                [
                    s.calls_s["build_connector_meta"]
                    for s in self._ordinary
                    if bool(s.store_count) is has_stores
                ]
                or [0.0]
            )
            for has_stores in (False, True)
        }
        return [
            sum(
                sum(spent.calls_s.get(name, 0.0) for name in ADMITTING_CALLS)
                - plan_s[bool(spent.store_count)]
                for spent in steps
            )
            for steps in admissions
        ]

    def _replace(self, index: int) -> list[Spent]:
        """The steps that admitted the new request: two if it was loaded."""
        engine = self._engine
        engine.stopwatch.take()
        engine.finish(self._running.popleft())
        between_s = [sum(engine.stopwatch.take().values())]
        name = self._add(index)
        between_s.append(sum(engine.stopwatch.take().values()))
        self._finishes_s.append(between_s[0])
        self._arrivals_s.append(between_s[1])
        steps: list[Spent] = []
        while not engine.is_running(name):
            step = engine.step()
            self._turnover_s.append(step.ours_s + sum(between_s))
            between_s = []
            if "update_state_after_alloc" in step.calls_s:
                steps.append(step)
        return steps

    def _wrapping(self) -> list[float]:
        """What is measured of a call that does nothing: in every number, once for each call."""
        stopwatch = Stopwatch(self._clock)
        nothing = stopwatch.timed("nothing", lambda: None)
        spent = []
        for _ in range(WRAPPED_CALLS):
            nothing()
            spent.append(stopwatch.take()["nothing"])
        return spent


def _medians(steps: Sequence[Spent]) -> dict[str, float]:
    """The median of each call's share, of those that most steps have."""
    names = dict.fromkeys(name for spent in steps for name in spent.calls_s)
    return {
        name: round(median(spent.calls_s.get(name, 0.0) for spent in steps) * 1e6, 1)
        for name in names
    }


def engine_config(folder: Path, request_count: int, tokens_max: int) -> VllmConfig:
    """Of an engine whose requests have at most `tokens_max` tokens."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK_TOKENS,
        max_model_len=tokens_max,
        max_num_seqs=request_count,
        max_num_batched_tokens=STEP_TOKENS_MAX,
        async_scheduling=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector=CONNECTOR,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=options(folder),
        ),
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = request_count * tokens_max // BLOCK_TOKENS
    return config


def measure(folder: Path, request_count: int, step_count: int) -> dict[str, Any]:
    """Measures in `folder`, which is empty and stays the caller's."""
    load_general_plugins()
    clock = SystemClock()
    tokens_max = 2 * PROMPT_TOKENS + 8 * step_count
    engine = Engine(engine_config(folder, request_count, tokens_max), clock)
    catalog = LmdbCatalog(folder / "catalog", clock)
    try:
        who = identity(folder / "pages")
        config = decode(options(folder))
        catalog.open(who.store_id, config.capacity_bytes, config.segment_bytes)
        worker = Worker(catalog, who)
        engine.employ(worker)
        return Measurement(engine, worker, clock, request_count).run(step_count)
    finally:
        catalog.close()
        engine.close()


def main() -> None:
    """What vLLM prints on standard output goes to standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    reply = measure(Path(job["folder"]), job["requests"], job["steps"])
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
