"""What of an engine's requests is left alone, though the engine starts: neither looked up nor
stored, since it could not be loaded, or since nothing names it."""

from collections.abc import Iterator
from typing import Any, NamedTuple


class Sharing(NamedTuple):
    """`prefixes`: False if the model must compute every prompt whole. `media`: False if the engine
    does not name images and the like by their content."""

    prefixes: bool = True
    media: bool = True

    def reasons(self) -> Iterator[str]:
        """Why something is left alone, for the log."""
        if not self.prefixes:
            yield (
                "this model reads every token of a prompt in one step (its pooling, or its"
                " attention): kvferry neither loads nor stores anything for it"
            )
        if not self.media:
            yield (
                "with mm_processor_cache_gb 0 and prefix caching off vLLM numbers images and"
                " sounds, it does not look at them: kvferry leaves requests with any alone. Turn"
                " one of the two on to share them"
            )


EVERYTHING = Sharing()


def of_engine(vllm_config: Any) -> Sharing:
    """As the engine was configured."""
    model = vllm_config.model_config
    media = getattr(model, "multimodal_config", None)
    is_media_cached = getattr(media, "mm_processor_cache_gb", 1) > 0
    return Sharing(
        prefixes=getattr(model, "is_prefix_caching_supported", True),
        media=is_media_cached or vllm_config.cache_config.enable_prefix_caching,
    )
