"""Two engines share pages exactly if their bytes are interchangeable: neither less nor more."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from kvferry.config import decode
from kvferry.errors import ConfigError
from kvferry.layout import Placement
from kvferry.vllm_plugin import versions
from kvferry.vllm_plugin.identity import Rank, chunk_tokens_of, local_parts

BLOCK_COUNT, HEAD_SIZE = 4, 8
MODEL = {"model": "m"}


@dataclasses.dataclass
class FullAttentionSpec:
    block_size: int = 32
    num_kv_heads: int = 2
    head_size: int = HEAD_SIZE
    dtype: torch.dtype = torch.float32
    sliding_window: int | None = None
    kv_quant_mode: object = None


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class FlashAttentionBackend:
    pass


class CPUAttentionBackend:
    pass


def module(backend=FlashAttentionBackend, isa="vec", **scales):
    return SimpleNamespace(get_attn_backend=lambda: backend, isa=isa, **scales)


def one_rank() -> Rank:
    return Rank(index=0, count=1, stage=0, stage_count=1, tp_index=0, tp_count=1)


def rank(tp_index: int, tp_count: int) -> Rank:
    return dataclasses.replace(
        one_rank(), index=tp_index, count=tp_count, tp_index=tp_index, tp_count=tp_count
    )


class Engine:
    """What the worker role knows, for a model of two layers and one cache group."""

    def __init__(self, monkeypatch, spec=None, layer=None, total_heads=2):
        self.spec = spec or FullAttentionSpec()
        self.names = ["model.layers.10.attn", "model.layers.2.attn"]
        shape = (BLOCK_COUNT, self.spec.num_kv_heads, self.spec.block_size, 2 * HEAD_SIZE)
        self.caches = {name: torch.zeros(shape, dtype=self.spec.dtype) for name in self.names}
        self.total_heads = total_heads
        found = {name: layer or module() for name in [*self.names, "model.layers.11.attn"]}
        monkeypatch.setattr(
            versions, "attention_layers", lambda _, names: {name: found[name] for name in names}
        )

    def parts(self, rank=None, model=MODEL, **options):
        group = SimpleNamespace(layer_names=self.names, kv_cache_spec=self.spec)
        cache_config = SimpleNamespace(kv_cache_groups=[group], num_blocks=BLOCK_COUNT)
        engine = SimpleNamespace(
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: self.total_heads)
        )
        config = decode({"pages": "posix:///p", "chunk_tokens": 64} | options)
        return local_parts(config, engine, cache_config, self.caches, rank or one_rank(), model)

    def namespace(self, **changes) -> bytes:
        return self.parts(**changes)[0].part.namespace


@pytest.fixture
def engine(monkeypatch):
    return lambda **changes: Engine(monkeypatch, **changes)


def test_an_engine_started_again_is_the_same(engine):
    assert engine().namespace() == engine().namespace()


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": FullAttentionSpec(dtype=torch.bfloat16)},
        {"spec": FullAttentionSpec(num_kv_heads=4)},
        {"spec": SlidingWindowSpec(sliding_window=4096)},
        {"layer": module(CPUAttentionBackend)},
    ],
    ids=["dtype", "heads", "window", "backend"],
)
def test_what_changes_bytes_changes_the_namespace(engine, changes):
    assert engine(**changes).namespace() != engine().namespace()


def test_another_model_or_chunk_is_another_namespace(engine):
    names = {
        engine().namespace(),
        engine().namespace(model={"model": "other"}),
        engine().namespace(chunk_tokens=128),
    }
    assert len(names) == 3


def test_windows_are_told_apart(engine):
    one = engine(spec=SlidingWindowSpec(sliding_window=4096)).namespace()
    assert engine(spec=SlidingWindowSpec(sliding_window=2048)).namespace() != one


def test_static_scales_are_part_of_the_bytes(engine):
    def quantised(scale):
        mode = SimpleNamespace(name="FP8_PER_TENSOR")
        layer = module(_k_scale_float=scale, _v_scale_float=1.0)
        return engine(spec=FullAttentionSpec(kv_quant_mode=mode), layer=layer).namespace()

    assert quantised(0.5) == quantised(0.5) != quantised(0.25)


def test_block_sizes_share_where_tokens_are_addressable(engine):
    assert engine(spec=FullAttentionSpec(block_size=64)).namespace() == engine().namespace()


def test_block_sizes_and_instruction_sets_do_not_share_where_the_backend_packs(engine):
    names = {
        engine(
            layer=module(CPUAttentionBackend), spec=FullAttentionSpec(block_size=size)
        ).namespace()
        for size in (32, 64)
    }
    names.add(engine(layer=module(CPUAttentionBackend, isa="amx")).namespace())
    assert len(names) == 3


def test_tensor_parallelism_shares_one_page_and_each_rank_holds_its_heads(engine):
    whole = engine().parts()[0]
    halves = [
        engine(spec=FullAttentionSpec(num_kv_heads=1)).parts(rank=rank(index, 2))[0]
        for index in range(2)
    ]

    assert whole.part == halves[0].part == halves[1].part
    assert [half.placement for half in halves] == [Placement(0, 1), Placement(1, 1)]


def test_replicated_heads_are_written_in_turn(engine):
    held = [
        engine(spec=FullAttentionSpec(num_kv_heads=1)).parts(rank=rank(index, 4))[0].placement
        for index in range(4)
    ]

    assert held == [
        Placement(0, 1, 0, 2), Placement(0, 1, 1, 2), Placement(1, 1, 0, 2), Placement(1, 1, 1, 2)
    ]  # fmt: skip


def test_mla_is_one_slice_that_all_ranks_hold(engine):
    found = engine(spec=MLAAttentionSpec(num_kv_heads=1)).parts(rank=rank(2, 4))[0]

    assert found.part.slice_count == 1
    assert found.placement == Placement(0, 1, 2, 4)


def test_heads_that_do_not_add_up_are_refused(engine):
    with pytest.raises(ConfigError, match="KV heads"):
        engine(spec=FullAttentionSpec(num_kv_heads=2), total_heads=2).parts(rank=rank(0, 2))


def test_layers_lie_in_their_natural_order(engine):
    regions = engine().parts()[0].regions
    assert [found.layer for found in regions] == ["model.layers.2.attn", "model.layers.10.attn"]


def test_a_layer_that_shares_anothers_cache_is_stored_once(engine):
    sharing = engine()
    sharing.names.append("model.layers.11.attn")
    sharing.caches["model.layers.11.attn"] = sharing.caches["model.layers.10.attn"]

    assert sharing.parts()[0].part == engine().parts()[0].part


def test_a_cache_that_is_not_what_its_specification_says_is_refused(engine):
    wrong = engine()
    wrong.spec = dataclasses.replace(wrong.spec, block_size=64)

    with pytest.raises(ConfigError, match="packs"):
        wrong.parts()


def test_payloads_hold_all_layers_of_a_chunk(engine):
    part = engine().parts()[0].part
    assert part.payload_bytes == 2 * 64 * 2 * HEAD_SIZE * 4


@pytest.mark.parametrize(
    ("slice_bytes", "block", "window", "expected"),
    [
        (16 << 10, 16, None, 64),  # 8B GQA: 32 layers of 2 * 128 * 2 bytes
        (40 << 10, 16, None, 32),  # 70B
        (64, 16, None, 256),
        (64, 48, None, 288),
        (16 << 10, 16, 128, 64),
        (16 << 10, 16, 100, 32),
        (64, 32, 64, 32),
        (64, 64, 64, 64),  # never less than a block
    ],
)
def test_default_chunks(slice_bytes, block, window, expected):
    config = decode({"pages": "posix:///p"})
    assert chunk_tokens_of(config, block, slice_bytes, window) == expected


def test_a_chunk_that_is_no_multiple_of_the_block_is_refused():
    with pytest.raises(ConfigError, match="multiple of the block size 32"):
        chunk_tokens_of(decode({"pages": "posix:///p", "chunk_tokens": 48}), 32, 1024, None)
