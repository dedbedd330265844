"""If two requests with different inputs had one key, one would be answered from the other's KV."""

from types import SimpleNamespace

import pytest
import torch

from kvferry.vllm_plugin.request import Adapters, EngineRequest
from kvferry.vllm_plugin.sharing import EVERYTHING, Sharing

LATER_S = 1e10
"""An engine that starts after every file of a test has been written."""


def request(adapters=None, sharing=EVERYTHING, **changes) -> EngineRequest:
    fields = {
        "request_id": "r",
        "all_token_ids": list(range(256)),
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "skip_reading_prefix_cache": False,
        "resumable": False,
    }
    return EngineRequest(
        SimpleNamespace(**(fields | changes)), adapters or Adapters(LATER_S), sharing
    )


def lora(folder, number=1):
    return SimpleNamespace(lora_path=str(folder), lora_int_id=number)


def image(identifier: str, offset: int, length: int):
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=position)


def adapter(folder, content: bytes):
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def test_a_plain_request_has_no_extras():
    assert request().extras(0, 64) == b""


def test_salts_isolate():
    assert request(cache_salt="a").extras(0, 64) != request(cache_salt="b").extras(0, 64)


def test_a_salt_is_in_the_first_chunk_only_since_keys_are_chained():
    assert request(cache_salt="a").extras(64, 128) == b""


def test_a_salt_is_not_an_image():
    salted = request(cache_salt="x").extras(0, 64)
    assert request(mm_features=[image("x", 0, 8)]).extras(0, 64) != salted


@pytest.mark.parametrize(
    ("one", "other"),
    [(image("cat", 8, 16), image("dog", 8, 16)), (image("cat", 8, 16), image("cat", 9, 16))],
    ids=["another image", "another place"],
)
def test_images_are_told_apart(one, other):
    assert request(mm_features=[one]).extras(0, 64) != request(mm_features=[other]).extras(0, 64)


def test_an_image_counts_in_every_chunk_that_it_touches():
    touched = request(mm_features=[image("cat", 60, 10)])

    assert touched.extras(0, 64) != b""
    assert touched.extras(64, 128) != b""
    assert touched.extras(128, 192) == b""


def named(adapters, folder, number=1) -> EngineRequest:
    found = request(adapters, lora_request=lora(folder, number))
    assert found.name()
    return found


def test_adapters_are_told_apart_by_their_files_and_not_by_their_path(tmp_path):
    adapters = Adapters(LATER_S)
    one = adapter(tmp_path / "one", b"first")
    same = adapter(tmp_path / "same", b"first")
    other = adapter(tmp_path / "other", b"second")

    def key(folder, number):
        return named(adapters, folder, number).extras(0, 64)

    assert key(one, 1) == key(same, 2)
    assert key(one, 1) != key(other, 3)


def test_an_adapter_whose_files_changed_is_left_alone(tmp_path):
    adapters = Adapters(LATER_S)
    folder = adapter(tmp_path / "one", b"first")
    named(adapters, folder)

    (folder / "adapter_model.safetensors").write_bytes(b"another")
    after = request(adapters, lora_request=lora(folder))

    assert not after.name()
    assert not after.is_cacheable


def test_an_adapter_newer_than_the_engine_is_left_alone(tmp_path):
    """vLLM may have loaded what was there before, and answer from that."""
    folder = adapter(tmp_path / "one", b"first")
    adapters = Adapters(started_s=folder.stat().st_ctime - 10)

    assert not request(adapters, lora_request=lora(folder)).name()


def test_one_request_keeps_one_name_for_its_adapter(tmp_path):
    folder = adapter(tmp_path / "one", b"first")
    kept = named(Adapters(LATER_S), folder)
    before = kept.extras(0, 64)
    (folder / "adapter_model.safetensors").write_bytes(b"another")

    assert kept.name()
    assert kept.extras(0, 64) == before


def test_an_adapter_that_is_no_folder_is_left_alone():
    hub = request(lora_request=lora("org/adapter"))

    assert not hub.name()
    assert not hub.is_cacheable


def test_no_file_is_touched_before_a_request_is_named():
    """The engine's thread asks everything else: a mount that hangs would hold all requests."""

    class Hanging:
        def name(self, lora_request):
            raise AssertionError("files are read")

    hung = request(Hanging(), lora_request=lora("/mnt/hangs"))

    assert hung.is_cacheable
    assert hung.is_readable
    assert hung.extras(64, 128) == b""
    with pytest.raises(AssertionError, match="files are read"):
        hung.name()


def test_half_a_character_is_a_name_like_any_other():
    """Any JSON can hold one: it would end kvferry in this engine."""
    half, other = "\ud800", "\ud801"

    assert request(cache_salt=half).extras(0, 64) != request(cache_salt=other).extras(0, 64)
    one, two = (request(mm_features=[image(name, 0, 8)]) for name in (half, other))
    assert one.extras(0, 64) != two.extras(0, 64)


def test_vectors_are_told_apart():
    vectors = torch.arange(256 * 4, dtype=torch.bfloat16).view(256, 4)
    changed = vectors.clone()
    changed[70] += 1

    one, other = request(prompt_embeds=vectors), request(prompt_embeds=changed)

    assert one.extras(0, 64) == other.extras(0, 64)
    assert one.extras(64, 128) != other.extras(64, 128)


def test_tokens_among_vectors_are_told_apart():
    vectors = torch.zeros(64, 4)
    mask = [False] * 64
    one = request(prompt_embeds=vectors, prompt_is_token_ids=mask)
    other = request(prompt_embeds=vectors, prompt_is_token_ids=[True, *mask[1:]])

    assert one.extras(0, 64) != other.extras(0, 64)


def test_sessions_and_log_probabilities_of_prompts_are_left_alone():
    assert not request(resumable=True).is_cacheable
    assert not request(skip_reading_prefix_cache=True).is_readable


def test_a_model_that_reads_whole_prompts_is_left_alone():
    """A prompt of which a part was loaded would end the engine."""
    assert not request(sharing=Sharing(prefixes=False)).is_cacheable


def test_images_without_a_name_are_left_alone_and_text_is_not():
    """The first image of each engine would have the name of the first of all others."""
    numbered = Sharing(media=False)

    assert not request(sharing=numbered, mm_features=[image("mm-1", 0, 8)]).is_cacheable
    assert request(sharing=numbered).is_cacheable
