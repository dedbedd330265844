"""The worker role's end: what a peer may still write to stays mapped."""

import pytest

from kvferry.clock import SystemClock
from kvferry.metrics import Metrics
from kvferry.transfer.settings import Settings
from kvferry.vllm_plugin.pd import worker
from kvferry.vllm_plugin.pd.worker import WorkerRole


class Half:
    """A rank whose link is clear, or not. `rank`: itself."""

    def __init__(self, is_clear, is_idle=True):
        self._is_clear = is_clear
        self.is_idle = is_idle
        self.rank = self

    def close(self):
        return self._is_clear


@pytest.mark.parametrize(
    ("consumer", "producer", "kept"),
    [
        (Half(True), Half(True), []),
        (Half(False), None, ["consumer"]),
        (None, Half(False), ["memory"]),
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
    names = {"consumer": consumer, "memory": {"layer": None}}
    assert found == [names[name] for name in kept]
