"""The store's capacity holds, and an old model's pages make room for a new one's."""

import time

from tests.e2e import prompts
from tests.e2e.engine import EngineProcess
from tests.e2e.store import BOOKKEEPING_BYTES, Store

PROMPTS = [prompts.tokens(1000, seed=seed) for seed in range(20)]
FEW_PROMPTS = PROMPTS[:4]
ROUNDS = 6
CAPACITY_BYTES = 32 << 20  # 288 pages of these models: 19 prompts
SMALL = {
    "capacity_bytes": CAPACITY_BYTES,
    "segment_bytes": 1 << 20,
    "grace_s": 0.2,
    "reserve_ahead_count": 20,
    "store_deadline_s": 4.0,
    "reservation_lease_s": 8.0,
}
"""An idle engine's reserved slots keep its segments from being deleted until their leases end, so
the new model gets its share after about a lease and not before. What is reserved ahead, and as
much again that is kept free, is small against the store, as it is in stores of usual size."""


def test_capacity_holds_and_a_new_model_gets_its_share(
    engine_a, engine_b, model, store, tmp_path_factory
):
    alone = Store(tmp_path_factory.mktemp("alone"))
    engine_b.open(model("other"), **alone.settings(**SMALL))
    alone_hit_tokens = _last_round(engine_b, alone)
    engine_b.close()

    engine_a.open(model("full"), **store.settings(**SMALL))
    for prompt in PROMPTS:
        _ask(engine_a, store, prompt)
    filled_bytes = store.disk_bytes()
    engine_b.open(model("other"), **store.settings(**SMALL))
    together_hit_tokens = _last_round(engine_b, store)
    for prompt in PROMPTS:  # both at once
        _ask(engine_a, store, prompt)
    engine_a.close()
    engine_b.close()
    engine_b.open(model("other"), **store.settings(**SMALL))
    for prompt in PROMPTS:
        _ask(engine_b, store, prompt)
    engine_b.close()

    assert alone_hit_tokens == len(FEW_PROMPTS) * 960
    assert filled_bytes > 0.9 * CAPACITY_BYTES, "nothing had to make room"
    assert together_hit_tokens >= 0.9 * alone_hit_tokens


def _last_round(engine: EngineProcess, store: Store) -> int:
    """Tokens loaded when all prompts were asked several times."""
    for _ in range(ROUNDS):
        hit_tokens = sum(_ask(engine, store, prompt) for prompt in FEW_PROMPTS)
    return hit_tokens


def _ask(engine: EngineProcess, store: Store, prompt: list[int]) -> int:
    """Tokens loaded for it. What the engine itself has cached does not count; some time passes,
    in which room is made."""
    engine.reset_prefix_cache()
    answer = engine.generate([prompt], max_tokens=1)
    time.sleep(0.5)
    assert store.disk_bytes() <= CAPACITY_BYTES + BOOKKEEPING_BYTES
    return answer.external_hit_tokens
