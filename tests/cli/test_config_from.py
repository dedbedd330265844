"""Who comes from vLLM's HF3FSKVConnector gets a configuration that kvferry takes."""

import json

import pytest
from typer.testing import CliRunner

from kvferry.cli.config_from import translate
from kvferry.cli.main import app
from kvferry.config import decode
from kvferry.errors import ConfigError

OLD = {
    "hf3fs_storage_path": "/mnt/3fs/vllm/",
    "hf3fs_metadata_server_url": "http://10.0.0.1:18000",
    "hf3fs_file_size": 1 << 40,
    "hf3fs_client_numjobs": 16,
    "hf3fs_max_device_buffer_count": 16,
}


def test_each_setting_has_its_counterpart_or_a_remark():
    new, remarks = translate(OLD)
    made = decode(new["kv_connector_extra_config"])
    assert made.pages == "usrbio:///mnt/3fs/vllm/kvferry"
    assert made.capacity_bytes == 1 << 40
    assert (made.read_threads, made.write_threads) == (16, 16)
    assert new["kv_load_failure_policy"] == "recompute"
    for name in ("metadata_server_url", "max_device_buffer_count", "file_size"):
        assert any(name in remark for remark in remarks)


def test_what_is_needed_and_not_there_is_said():
    assert any("capacity_bytes" in remark for remark in translate({"hf3fs_storage_path": "/m"})[1])
    with pytest.raises(ConfigError, match="usrbio:///"):
        translate({"hf3fs_storage_path": "relative"})
    with pytest.raises(ConfigError, match="hf3fs_storage_pth"):
        translate({"hf3fs_storage_pth": "/mnt"})


def test_the_command_prints_json():
    done = CliRunner().invoke(app, ["config", "from-hf3fs", json.dumps(OLD)])
    assert json.loads(done.stdout)["kv_connector"] == "FerryStoreConnector"
