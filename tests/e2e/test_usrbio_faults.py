"""Each way in which 3FS fails, in a real engine: the answers stay the same, and nothing hangs.

The store is on an emulated 3FS whose daemon lives in the engine's process. Each case shows that its
fault fired and that its counter moved, and then that the store works again.
"""

import time

import pytest

from tests.e2e import prompts
from tests.e2e.store import Store

pytestmark = pytest.mark.slow

PROMPT_TOKENS = 1000
FULL_CHUNK_TOKENS = 960
DEADLINE_S = 3.0
LATE_MS = 4500
SETTINGS = {
    "read_threads": 2,
    "load_deadline_s": DEADLINE_S,
    "store_deadline_s": DEADLINE_S,
    "failed_key_ttl_s": 0.1,
    "reserve_ahead_count": 64,
    "cost_model": False,
}
FAULTS = {
    "eio": ({"eio": 1}, "io_error"),
    "eremoteio": ({"eremoteio": 1}, "io_error"),
    "eintr": ({"eintr": 1}, "io_error"),
    "enospc": ({"enospc": 1}, "no_space"),
    "late": ({"late": 1, "late_ms": LATE_MS}, "late"),
    "lost": ({"lost": 1}, "late"),
}


class Rig:
    """An engine with a store on the emulated 3FS."""

    def __init__(self, engine, model, emulation):
        self._engine = engine
        self._library = emulation.path
        self.store = Store(emulation.mount)
        engine.inject("impatient_rings", io_deadline_s=1.0, ring_deadline_s=8.0)
        pages = f"usrbio://{self.store.pages}"
        library = str(emulation.path)
        engine.open(model, **self.store.settings(pages=pages, usrbio_library=library, **SETTINGS))
        self.store.make_ready(engine)

    def ask(self, prompt):
        """The answer of an engine that has nothing cached itself; returns when all is at rest."""
        self._engine.reset_prefix_cache()
        answers = self._engine.generate([prompt])
        self._engine.wait_for_rest()
        return answers

    def fail(self, fault: str | None) -> int:
        """Lets this fault happen, or none; how often it has happened."""
        settings = FAULTS[fault][0] if fault else {}
        return self._engine.emulate(self._library, settings).get(fault, 0)

    def fired(self, fault: str) -> int:
        return self._engine.emulate(self._library)[fault]

    def counter(self, name: str) -> float:
        """As the engine shows it: what was counted since its last step comes with the next ones."""
        self._engine.generate([[1]], max_tokens=4)
        return self._engine.metrics().get(name, 0.0)

    def close(self) -> None:
        self.fail(None)
        self._engine.close()
        self._engine.restore()


@pytest.fixture
def rig(engine_a, model, emulation):
    rig = Rig(engine_a, model("full"), emulation)
    yield rig
    rig.close()
    assert emulation.links() == []


def _page_count() -> int:
    return FULL_CHUNK_TOKENS // 64


@pytest.mark.parametrize("fault", FAULTS)
def test_while_storing(rig, fault):
    prompt = prompts.tokens(PROMPT_TOKENS)
    counter = f"vllm:kvferry_store_drops:{FAULTS[fault][1]}"
    dropped = rig.counter(counter)
    fired = rig.fail(fault)

    cold = rig.ask(prompt)
    assert rig.fired(fault) > fired
    rig.fail(None)
    assert rig.counter(counter) >= dropped + _page_count()
    time.sleep(DEADLINE_S)  # until then nobody tries to store these keys again
    again = rig.ask(prompt)
    rig.store.wait_for_pages(_page_count())
    warm = rig.ask(prompt)

    assert (cold.external_hit_tokens, again.external_hit_tokens) == (0, 0)
    assert warm.external_hit_tokens == FULL_CHUNK_TOKENS
    assert cold.tokens == again.tokens == warm.tokens
    _require_overdue(rig, fault)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "enospc"])
def test_while_loading(rig, fault):
    prompt = prompts.tokens(PROMPT_TOKENS)
    counter = f"vllm:kvferry_load_failures:{FAULTS[fault][1]}"
    cold = rig.ask(prompt)
    rig.store.wait_for_pages(_page_count())
    failures = rig.counter(counter)
    fired = rig.fail(fault)

    failed = rig.ask(prompt)
    assert rig.fired(fault) > fired
    rig.fail(None)
    assert rig.counter(counter) > failures
    assert rig.counter("vllm:kvferry_loaded_tokens") == 0
    time.sleep(2 * SETTINGS["failed_key_ttl_s"])  # until then keys that failed are not offered
    warm = rig.ask(prompt)

    assert cold.tokens == failed.tokens == warm.tokens
    assert warm.external_hit_tokens == FULL_CHUNK_TOKENS
    assert rig.counter("vllm:kvferry_loaded_tokens") == FULL_CHUNK_TOKENS
    _require_overdue(rig, fault)


def _require_overdue(rig, fault: str) -> None:
    """What was without an answer is counted, and none of it is out of use any more."""
    assert rig.counter("vllm:kvferry_overdue_ios") == 0
    assert (rig.counter("vllm:kvferry_ios_overdue") > 0) == (fault in ("late", "lost"))
