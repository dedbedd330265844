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


def record(name: str, hf_config=None, load=(), options=(), **changes):
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
        load_config=SimpleNamespace(
            **({"load_format": "auto", "model_loader_extra_config": {}} | dict(load))
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )
    return model_record(decode({"pages": "posix:///kv"} | dict(options)), vllm_config)


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
        record(
            "org/model",
            HubConfig(rms_norm_eps=value),
            hf_config_path="/other",
            revision="c0ffee" + "0" * 34,
        )
        for value in (0.1, 0.5)
    )
    assert one != other


def test_the_commit_of_a_configuration_from_another_place_does_not_name_the_weights():
    with pytest.raises(ConfigError, match="model_id"):
        record("org/model", hf_config_path="org/other", revision="main")


def test_a_resolved_revision_names_the_weights():
    class Revision(str):
        """As the hub's library resolves one."""

    one, other = Revision("main"), Revision("main")
    one.resolved, other.resolved = "1" * 40, "2" * 40

    assert record("org/model", revision=one) != record("org/model", revision=other)


@pytest.mark.parametrize("load_format", ["tensorizer", "sharded_state", "ipc_cache", "mine"])
def test_weights_from_elsewhere_need_a_name(tmp_path, load_format):
    """The folder holds weights that the engine may never have read."""
    load = {"load_format": load_format, "model_loader_extra_config": {"uri": "s3://bucket/weights"}}
    folder = str(model(tmp_path / "x"))

    with pytest.raises(ConfigError, match=f"{load_format}.*model_id"):
        record(folder, load=load)
    record(folder, load=load, options={"model_id": "mine"})


def test_weights_that_were_fetched_from_an_object_store_need_a_name(tmp_path):
    with pytest.raises(ConfigError, match="model_id"):
        record(
            str(model(tmp_path / "x")),
            load={"load_format": "runai_streamer"},
            model_weights="s3://bucket/model",
        )


def test_what_a_loader_is_told_is_told_apart(tmp_path):
    folder = str(model(tmp_path / "x"))
    plain, other_format, told = (
        record(folder, load=load)
        for load in (
            {},
            {"load_format": "pt"},
            {"model_loader_extra_config": {"enable_multithread_load": True}},
        )
    )
    assert plain != other_format != told != plain


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "consolidated.pt", "text/model.safetensors"], ids=str
)
def test_weights_beside_those_that_are_usually_read_count(tmp_path, name):
    """Formats and models read different files of a folder."""
    digests = []
    for seed in (1, 2):
        folder = model(tmp_path / str(seed))
        (folder / name).parent.mkdir(exist_ok=True)
        weights = torch.randn(1 << 10, generator=torch.Generator().manual_seed(seed))
        if name.endswith(".safetensors"):
            save_file({"d": weights}, folder / name)
        else:
            (folder / name).write_bytes(weights.numpy().tobytes())
        digests.append(folder_digest(folder))

    assert digests[0] != digests[1]


@pytest.mark.parametrize("name", ["params.json", "preprocessor_config.json", "modeling_x.py"])
def test_files_that_say_what_is_computed_count(tmp_path, name):
    digests = []
    for content in ("1", "2"):
        folder = model(tmp_path / content)
        (folder / name).write_text(content)
        digests.append(folder_digest(folder))

    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"model_class_overrides": {"Qwen3ForCausalLM": "mine:Model"}},
        {"quantization_config": {"linear": "fp8"}},
        {"config_format": "mistral"},
        {"code_revision": "experiment"},
        {"multimodal_config": SimpleNamespace(mm_processor_kwargs={"num_crops": 4})},
        {"multimodal_config": SimpleNamespace(media_io_kwargs={"video": {"num_frames": 4}})},
        {"multimodal_config": SimpleNamespace(video_pruning_rate=0.5)},
        {"multimodal_config": SimpleNamespace(mm_encoder_attn_dtype="fp8")},
    ],
    ids=str,
)
def test_settings_that_change_what_is_computed_are_told_apart(changes):
    assert record("org/model", **changes) != record("org/model")


def test_settings_that_say_nothing_are_as_if_they_were_not_there():
    silent = SimpleNamespace(mm_processor_kwargs=None, media_io_kwargs={}, video_pruning_rate=None)
    assert record(
        "org/model",
        config_format="auto",
        quantization_config=None,
        model_class_overrides={},
        multimodal_config=silent,
    ) == record("org/model")


def test_two_ways_to_prune_videos_and_two_files_of_scales_are_told_apart(tmp_path):
    ways = [
        SimpleNamespace(video_pruning_rate=0.5, video_pruning_method=way)
        for way in ("evs", "vidcom2")
    ]
    scales = []
    for content in ("1", "2"):
        (tmp_path / content).write_text(content)
        scales.append(
            SimpleNamespace(
                mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(tmp_path / content)
            )
        )
    for pair in (ways, scales):
        one, other = (record("org/model", multimodal_config=media) for media in pair)
        assert one != other
