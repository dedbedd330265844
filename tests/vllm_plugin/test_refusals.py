"""What is refused would otherwise share bytes that are not interchangeable, or fail requests."""

from types import SimpleNamespace

import pytest

from kvferry.config import decode
from kvferry.errors import ConfigError
from kvferry.vllm_plugin import refusals
from kvferry.vllm_plugin.versions import check_version


class FullAttentionSpec:
    num_kv_heads = 2


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    pass


class PackedSpec(FullAttentionSpec):
    kv_quant_mode = SimpleNamespace(name="NVFP4")


PackedSpec.__name__ = "FullAttentionSpec"


def group(*specs, **changes):
    names = [f"layer.{index}" for index in range(len(specs))]
    held = SimpleNamespace(kv_cache_specs=dict(zip(names, specs, strict=True)))
    fields = {"layer_names": names, "kv_cache_spec": held, "is_eagle_group": False}
    return SimpleNamespace(**(fields | changes))


def settings(**changes):
    """An engine's configuration as dotted names, all as it should be but `changes`."""
    fields = {
        "kv_transfer_config": SimpleNamespace(
            kv_role="kv_both", kv_load_failure_policy="recompute"
        ),
        "parallel_config": SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        "model_config": SimpleNamespace(enable_sleep_mode=False),
        "cache_config": SimpleNamespace(calculate_kv_scales=False),
        "speculative_config": None,
    }
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            setattr(fields[part], field, value)
        else:
            fields[part] = value
    return SimpleNamespace(**fields)


FULL = group(FullAttentionSpec(), FullAttentionSpec())
OPTIONS = {"pages": "posix:///kv"}


def media(**changes):
    return {"model_config__multimodal_config": SimpleNamespace(**changes)}


def check(engine=None, groups=(FULL,), version=(0, 32), options=OPTIONS):
    cache = SimpleNamespace(kv_cache_groups=list(groups))
    refusals.check(decode(options), engine or settings(), cache, version)


def test_what_is_supported_starts():
    check(groups=[FULL, group(SlidingWindowSpec())])
    check(settings(speculative_config=SimpleNamespace(method="ngram")))
    check(settings(weight_transfer_config=None))
    check(
        settings(weight_transfer_config=SimpleNamespace(backend="nccl")),
        options=OPTIONS | {"allow_weight_updates": True},
    )
    check(settings(aux_output_config=SimpleNamespace(enabled=False)))
    check(settings(**media(mm_encoder_attn_dtype=None)))
    check(settings(**media(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path="/scales")))
    check(
        settings(kv_transfer_config__kv_load_failure_policy="fail"),
        options=OPTIONS | {"allow_failed_requests": True},
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_transfer_config__kv_role": "kv_producer"}, "kv_both"),
        (
            {"kv_transfer_config__kv_load_failure_policy": "fail"},
            '"kv_load_failure_policy": "recompute"',
        ),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "context parallelism"),
        ({"model_config__enable_sleep_mode": True}, "sleep mode"),
        ({"cache_config__calculate_kv_scales": True}, "calculate_kv_scales"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "eagle"),
        ({"weight_transfer_config": SimpleNamespace(backend="nccl")}, "reset_connector=True"),
        ({"model_config__is_diffusion": True}, "diffusion"),
        ({"aux_output_config": SimpleNamespace(enabled=True)}, "enable_return_routed_experts"),
        ({"model_config__enable_return_routed_experts": True}, "enable_return_routed_experts"),
        (
            media(mm_encoder_attn_dtype="fp8"),
            "mm_encoder_fp8_scale_path",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_refused_settings_say_why(changes, words):
    with pytest.raises(ConfigError, match=words):
        check(settings(**changes))


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (group(MambaSpec()), "MambaSpec"),
        (group(FullAttentionSpec(), is_eagle_group=True), "draft"),
        (group(FullAttentionSpec(), host_resident=True), "host memory"),
        (group(FullAttentionSpec(), SlidingWindowSpec()), "FullAttentionSpec, SlidingWindowSpec"),
        (group(PackedSpec()), "NVFP4"),
    ],
    ids=["mamba", "draft", "host", "mixed", "packed"],
)
def test_refused_groups_are_named(refused, words):
    with pytest.raises(ConfigError, match=words):
        check(groups=[FULL, refused])


def test_several_groups_need_a_version_that_reports_failed_loads():
    with pytest.raises(ConfigError, match=r"0\.30"):
        check(groups=[FULL, group(SlidingWindowSpec())], version=(0, 28))


@pytest.mark.parametrize("version", ["0.26.0", "0.32.1+cpu", "0.33.0rc1"])
def test_supported_versions(version):
    assert check_version(version) >= (0, 26)


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_refused_naming_the_range(version):
    with pytest.raises(ConfigError, match=r"0\.26 to 0\.33"):
        check_version(version)


def test_memory_that_no_copier_reaches_is_refused_by_name():
    refusals.check_memory({"cpu"})
    refusals.check_memory({"cuda"})
    with pytest.raises(ConfigError, match="lies in xpu memory"):
        refusals.check_memory({"xpu"})
    with pytest.raises(ConfigError, match="at once"):
        refusals.check_memory({"cpu", "cuda"})
