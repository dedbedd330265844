"""`kvferry config`: configurations made from those of others."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvferry import config
from kvferry.cli import output
from kvferry.errors import ConfigError
from kvferry.vllm_plugin import CONNECTOR

app = typer.Typer(help="Configurations.", no_args_is_help=True)

_THREADS_MAX = 64
_WITHOUT_COUNTERPART = {
    "hf3fs_metadata_server_url": "there is no metadata server: the catalog is embedded",
    "hf3fs_max_device_buffer_count": "gpu_buffer_bytes bounds GPU memory, by default 256 MiB",
}
_KNOWN = {"hf3fs_storage_path", "hf3fs_file_size", "hf3fs_client_numjobs", *_WITHOUT_COUNTERPART}


@app.callback()
def _commands() -> None:
    pass


@app.command("from-hf3fs")
def from_hf3fs(
    old: Annotated[str, typer.Argument(metavar="JSON", help="Its kv_connector_extra_config.")],
) -> None:
    """Print the configuration that does what one of vLLM's HF3FSKVConnector does."""
    try:
        settings = json.loads(old)
    except json.JSONDecodeError as error:
        raise ConfigError("cli.json", f"this is no JSON: {error}") from error
    new, remarks = translate(settings)
    for remark in remarks:
        output.complain(remark)
    output.print_json(new)


def translate(old: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`--kv-transfer-config` for an old `kv_connector_extra_config`, and what to know about it.
    Raises ConfigError for what HF3FSKVConnector does not read, and for values that cannot be."""
    if not isinstance(old, Mapping):
        raise ConfigError("cli.json", "kv_connector_extra_config is an object")
    unknown = sorted(old.keys() - _KNOWN)
    if unknown:
        raise ConfigError("cli.hf3fs_key", f"HF3FSKVConnector does not read {', '.join(unknown)}")
    folder = str(old.get("hf3fs_storage_path", "")).rstrip("/")
    extra: dict[str, Any] = {"pages": f"usrbio://{folder}/kvferry"}
    remarks = [f"{name}: {why}" for name, why in _WITHOUT_COUNTERPART.items() if name in old]
    if "hf3fs_file_size" in old:
        extra["capacity_bytes"] = old["hf3fs_file_size"]
        remarks.append("hf3fs_file_size was of one rank: capacity_bytes is of all engines together")
    else:
        remarks.append('add "capacity_bytes", such as "2TiB": it is needed to create the store')
    if "hf3fs_client_numjobs" in old:
        threads = min(int(old["hf3fs_client_numjobs"]), _THREADS_MAX)
        extra |= {"read_threads": threads, "write_threads": threads}
    remarks.append("set alignment_bytes to the chunk size of the folder, before the store is made")
    config.decode(extra)
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return transfer, remarks
