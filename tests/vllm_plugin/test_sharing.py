"""What an engine's configuration says of its requests: what is wrong here ends the engine, or
answers a question about one image from another one's KV."""

from types import SimpleNamespace

import pytest

from kvferry.vllm_plugin.sharing import EVERYTHING, Sharing, of_engine


def engine(prefix_caching=True, whole_prompts=False, media_cache_gb=None):
    """`media_cache_gb` None: a model that reads text only."""
    media = None
    if media_cache_gb is not None:
        media = SimpleNamespace(mm_processor_cache_gb=media_cache_gb)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            is_prefix_caching_supported=not whole_prompts, multimodal_config=media
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_text_is_shared(prefix_caching):
    assert of_engine(engine(prefix_caching)) == EVERYTHING


def test_a_model_that_reads_whole_prompts_is_seen():
    assert not of_engine(engine(whole_prompts=True)).prefixes


@pytest.mark.parametrize(
    ("prefix_caching", "media_cache_gb", "is_named"),
    [(True, 4, True), (True, 0, True), (False, 4, True), (False, 0, False)],
)
def test_media_are_named_by_content_if_either_cache_is_on(prefix_caching, media_cache_gb, is_named):
    assert of_engine(engine(prefix_caching, media_cache_gb=media_cache_gb)).media is is_named


def test_what_is_left_alone_is_said():
    assert list(EVERYTHING.reasons()) == []
    whole, numbered = Sharing(prefixes=False, media=False).reasons()
    assert "every token" in whole
    assert "mm_processor_cache_gb" in numbered
