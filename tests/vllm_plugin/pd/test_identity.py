"""What two engines must have in common is named so that a person sees what differs."""

from types import SimpleNamespace

import pytest
import torch

from kvferry.errors import IncompatibleError
from kvferry.transfer.compatibility import Compatibility, agree
from kvferry.vllm_plugin.identity import Layer
from kvferry.vllm_plugin.pd.identity import _layer_fields, _readable, _sort_in, storages


class FullAttentionSpec:
    sliding_window = None


class SlidingWindowSpec:
    sliding_window = 128


def fields_of(*groups, order="kv-per-token"):
    """`groups`: spec and layer names."""
    kinds = {}
    for spec, names in groups:
        group = SimpleNamespace(layer_names=names, kv_cache_spec=spec)
        for name in names:
            layer = Layer(SimpleNamespace(layer=name), {"name": name, "order": order})
            _sort_in(kinds, group, 2, layer)
    return dict(_layer_fields(list(kinds.values())))


FULL, WINDOW = FullAttentionSpec(), SlidingWindowSpec()


def test_layers_that_are_alike_share_their_fields():
    fields = fields_of((FULL, ["l.10", "l.2"]), (WINDOW, ["l.1"]), (FULL, ["l.3"]))
    assert fields["layers[0].window"] == 128
    assert fields["layers[1].names"].startswith("3 from l.2 to l.10 (")
    assert len(fields) == 10


def test_how_an_engine_groups_its_layers_does_not_matter():
    one = fields_of((FULL, ["l.1", "l.2"]))
    assert one == fields_of((FULL, ["l.2"]), (FULL, ["l.1"]))


def test_a_refusal_has_one_line_for_what_differs_in_all_layers():
    names = [f"l.{number}" for number in range(80)]
    mine = Compatibility(fields_of((FULL, names), order="cpu_attn:vec:block32"))
    theirs = Compatibility(fields_of((FULL, names), order="cpu_attn:vec:block64"))
    with pytest.raises(IncompatibleError) as refused:
        agree(mine, theirs)
    assert refused.value.message.count("layers[") == 1
    assert "'cpu_attn:vec:block32', not 'cpu_attn:vec:block64'" in refused.value.message


def test_every_field_can_be_read_and_sent():
    assert [_readable(value) for value in ("x", 7, True)] == ["x", 7, True]
    assert _readable(None) == "null"
    assert _readable({"a": [1.5, b"\x01"]} | {}) == '{"a": [1.5, "01"]}'


def test_an_allocation_is_registered_once():
    """Its layers are views of it."""
    whole = torch.zeros(1024, dtype=torch.int8)
    caches = {"a": whole[:512], "b": whole[512:], "c": torch.zeros(64)}
    assert [memory.length_bytes for memory in storages(caches)] == [1024, 256]
