"""Checks of the JSON that an operator gives to vLLM as --kv-transfer-config."""

import difflib
from collections.abc import Iterator
from typing import Any

import msgspec

from kvferry import config
from kvferry.cli.finding import Finding, failed, passed
from kvferry.errors import ConfigError
from kvferry.vllm_plugin import CONNECTOR

CHECK = "--kv-transfer-config"


def decode_transfer_config(text: str) -> dict[str, Any]:
    """Raises ConfigError that says where the JSON is wrong."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError("config.json", f"{CHECK} is no JSON object: {error}") from None


def own_config(transfer: dict[str, Any]) -> dict[str, Any] | None:
    """The part that names kvferry's connector, also below a MultiConnector."""
    if transfer.get("kv_connector") == CONNECTOR:
        return transfer
    parts = _extra(transfer).get("connectors")
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict) and part.get("kv_connector") == CONNECTOR:
            return part
    return None


def settings(own: dict[str, Any]) -> config.Config:
    """Raises ConfigError."""
    return config.decode(own.get("kv_connector_extra_config") or {})


def _extra(transfer: dict[str, Any]) -> dict[str, Any]:
    extra = transfer.get("kv_connector_extra_config")
    return extra if isinstance(extra, dict) else {}


def check_transfer_config(transfer: dict[str, Any]) -> Iterator[Finding]:
    own = own_config(transfer)
    if own is None:
        yield _wrong_connector(transfer.get("kv_connector"))
        return
    yield _check_policy(transfer, own)
    yield _check_role(own)
    try:
        settings(own)
    except ConfigError as error:
        yield failed("settings", str(error), "see docs/configuration.md")
    else:
        yield passed("settings", "valid")


def _wrong_connector(name: Any) -> Finding:
    near = difflib.get_close_matches(str(name), [CONNECTOR], 1, 0.4)
    detail = f"kv_connector is {name!r}" + (" (nearly right)" if near else "")
    return failed(CHECK, detail, f'"kv_connector": "{CONNECTOR}"')


def _check_policy(transfer: dict[str, Any], own: dict[str, Any]) -> Finding:
    """The policy stands at the top, also with a MultiConnector."""
    policy = transfer.get("kv_load_failure_policy", "fail (vLLM's default)")
    if policy == "recompute" or _extra(own).get("allow_failed_requests") is True:
        return passed("kv_load_failure_policy", str(policy))
    cure = 'add "kv_load_failure_policy": "recompute": a page that cannot be read is then a miss'
    return failed("kv_load_failure_policy", str(policy), cure)


def _check_role(own: dict[str, Any]) -> Finding:
    role = own.get("kv_role")
    if role == "kv_both":
        return passed("kv_role", role)
    return failed("kv_role", f"{role!r}", '"kv_role": "kv_both"')
