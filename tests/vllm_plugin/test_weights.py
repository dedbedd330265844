"""If two models had one name, one would be answered from the other's KV."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from kvferry.config import decode
from kvferry.errors import ConfigError
from kvferry.vllm_plugin.weights import folder_digest, model_record


def model(folder: Path, config: str = "{}", **changes: torch.Tensor) -> Path:
    """Three tensors of 4 MB, of which a digest of samples sees a small part."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(1 << 20, generator=generator) for name in ("a", "b", "c")}
    save_file(tensors | changes, folder / "model.safetensors")
    (folder / "config.json").write_text(config)
    return folder


def test_copies_of_a_folder_are_one_model(tmp_path):
    assert folder_digest(model(tmp_path / "x")) == folder_digest(model(tmp_path / "y"))


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_fine_tune_of_any_tensor_is_another_model(tmp_path, name):
    tuned = torch.randn(1 << 20, generator=torch.Generator().manual_seed(2))

    assert folder_digest(model(tmp_path / "x")) != folder_digest(
        model(tmp_path / "y", **{name: tuned})
    )


def test_another_configuration_is_another_model(tmp_path):
    one, other = model(tmp_path / "x"), model(tmp_path / "y", config='{"rope_theta": 2}')

    assert folder_digest(one) != folder_digest(other)


def test_weights_of_another_kind_are_told_apart(tmp_path):
    digests = []
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        weights = torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed))
        (tmp_path / name / "pytorch_model.bin").write_bytes(weights.numpy().tobytes())
        digests.append(folder_digest(tmp_path / name))

    assert digests[0] == digests[1] != digests[2]


def test_a_folder_without_weights_has_no_name(tmp_path):
    with pytest.raises(ConfigError, match="model_id"):
        folder_digest(tmp_path)


class HubConfig:
    """Of a model that came from the hub."""

    def __init__(self, **values):
        self._commit_hash = "c0ffee"
        self._values = values

    def to_dict(self):
        return dict(self._values)


def record(name: str, hf_config=None, **changes):
    fields = {
        "model": name,
        "hf_config": hf_config or HubConfig(),
        "dtype": "torch.bfloat16",
        "quantization": None,
        "hf_overrides": {},
        "hf_config_path": None,
        "max_model_len": 1024,
        "multimodal_config": None,
        "seed": 0,
    }
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(**(fields | changes)),
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )
    return model_record(decode({"pages": "posix:///kv"}), vllm_config)


def test_two_quantisations_in_one_repository_are_two_models():
    assert record("org/model-GGUF:Q4_K_M") != record("org/model-GGUF:Q8_0")
    assert record("org/model-GGUF:Q8_0") == record("org/model-GGUF:Q8_0")


def overriding(value: float):
    def change(config):
        return HubConfig(rms_norm_eps=value)

    return change


def test_functions_that_change_the_configuration_are_told_apart_by_what_they_do():
    """They may have one name."""
    one, same, other = (
        record("org/model", HubConfig(rms_norm_eps=value), hf_overrides=overriding(value))
        for value in (0.1, 0.1, 0.5)
    )
    assert one == same != other


def test_a_configuration_from_another_place_is_told_apart():
    one, other = (
        record("org/model", HubConfig(rms_norm_eps=value), hf_config_path="/other")
        for value in (0.1, 0.5)
    )
    assert one != other
