"""If two models had one name, one would be answered from the other's KV."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvferry.errors import ConfigError
from kvferry.vllm_plugin.weights import folder_digest


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
