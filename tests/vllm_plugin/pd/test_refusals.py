"""What is refused would otherwise fail requests, or bring bytes that mean something else."""

from types import SimpleNamespace

import pytest

from kvferry.errors import ConfigError
from kvferry.transfer.settings import Settings
from kvferry.vllm_plugin.pd import refusals
from tests.vllm_plugin.test_refusals import FullAttentionSpec, MambaSpec, group, settings

ORDINARY = Settings()
FULL = group(FullAttentionSpec())
FAIL = {"kv_transfer_config__kv_load_failure_policy": "fail"}


def check(cache_group=FULL, options=ORDINARY, *, is_kv_consumer=True, **changes):
    roles = {
        "kv_transfer_config__is_kv_consumer": is_kv_consumer,
        "parallel_config__pipeline_parallel_size": 1,
    }
    cache = SimpleNamespace(kv_cache_groups=[cache_group])
    refusals.check(options, settings(**(roles | changes)), cache, (0, 32))


def test_an_ordinary_engine_starts():
    check()


def test_a_consumer_must_not_fail_requests_unless_it_is_told_to():
    with pytest.raises(ConfigError, match='"kv_load_failure_policy": "recompute"'):
        check(**FAIL)
    check(options=Settings(allow_failed_requests=True), **FAIL)


def test_a_producer_loads_nothing_that_could_fail():
    check(is_kv_consumer=False, **FAIL)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "context parallelism"),
        ({"model_config__enable_sleep_mode": True}, "sleep mode"),
        ({"kv_transfer_config__enable_permute_local_kv": True}, "enable_permute_local_kv"),
        ({"model_config__enable_return_routed_experts": True}, "routed_experts"),
        ({"cache_config__calculate_kv_scales": True}, "scales"),
    ],
)
def test_what_is_not_supported_says_so_at_start(changes, words):
    with pytest.raises(ConfigError, match=words):
        check(**changes)


def test_states_of_mamba_are_refused():
    with pytest.raises(ConfigError, match="MambaSpec"):
        check(group(MambaSpec()))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_is_read_where_it_is(device):
    other = {"cpu": "cuda", "cuda": "cpu"}[device]
    refusals.check_memory(Settings(), SimpleNamespace(kv_buffer_device=device), {device})
    with pytest.raises(ConfigError, match=f"'{other}', and the KV cache lies in {device} memory"):
        refusals.check_memory(Settings(), SimpleNamespace(kv_buffer_device=other), {device})


def test_memory_that_no_copier_reaches_is_refused():
    with pytest.raises(ConfigError, match="xpu memory"):
        refusals.check_memory(Settings(), SimpleNamespace(kv_buffer_device="xpu"), {"xpu"})


def test_push_is_for_host_memory():
    push = Settings(direction="push")
    refusals.check_memory(push, SimpleNamespace(kv_buffer_device="cpu"), {"cpu"})
    with pytest.raises(ConfigError, match='direction is "push"'):
        refusals.check_memory(push, SimpleNamespace(kv_buffer_device="cuda"), {"cuda"})
