"""The worker role's end: what a peer may still write to stays mapped."""

import pytest

from kvferry.clock import SystemClock
from kvferry.errors import InternalError
from kvferry.metrics import Metrics
from kvferry.transfer.settings import Settings
from kvferry.vllm_plugin.pd import worker
from kvferry.vllm_plugin.pd.messages import Plans
from kvferry.vllm_plugin.pd.worker import WorkerRole


class Half:
    """A rank whose link is clear, or not. `rank`, `mover`: itself."""

    def __init__(self, is_clear, is_idle=True, has_failed=False):
        self._is_clear = is_clear
        self.is_idle = is_idle
        self.has_failed = has_failed
        self.rank = self.mover = self

    def close(self):
        return self._is_clear


@pytest.mark.parametrize(
    ("consumer", "producer", "kept"),
    [
        (Half(True), Half(True), []),
        (Half(False), None, ["consumer"]),
        (None, Half(False), ["producer and memory"]),
        (None, Half(True, is_idle=False), ["memory"]),
    ],
)
def test_what_is_still_in_use_outlives_the_engine(monkeypatch, consumer, producer, kept):
    """A read that is out writes to its staging whenever its peer goes on: unmapped, or mapped for
    something else by then, that ends the process or worse."""
    found = []
    monkeypatch.setattr(worker, "keep_alive", lambda what, duration_s: found.append(what))
    role = WorkerRole(Settings(), None, None, SystemClock(), Metrics())
    role._consumer, role._producer, role._kv_caches = consumer, producer, {"layer": None}
    role.close()
    role.close()
    memory = {"layer": None}
    names = {"consumer": consumer, "memory": memory, "producer and memory": (producer, memory)}
    assert found == [names[name] for name in kept]


def test_a_mover_that_failed_puts_the_connector_aside():
    """A producer would go on to offer what it never answers for: every request of every consumer
    would wait for its deadline."""
    role = WorkerRole(Settings(), None, None, SystemClock(), Metrics())
    role._producer = Half(True, has_failed=True)
    with pytest.raises(InternalError):
        role.before_step(Plans())
