"""Checks of the JSON that an operator gives to vLLM as --kv-transfer-config."""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kvferry import config
from kvferry.cli import transfer_checks
from kvferry.cli.finding import Finding, failed, passed
from kvferry.errors import ConfigError
from kvferry.vllm_plugin import CONNECTOR, MODULES, TRANSFER_CONNECTOR

CHECK = "--kv-transfer-config"


def decode_transfer_config(text: str) -> dict[str, Any]:
    """Raises ConfigError that says where the JSON is wrong."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError("config.json", f"{CHECK} is no JSON object: {error}") from None


def own_config(transfer: dict[str, Any], name: str = CONNECTOR) -> dict[str, Any] | None:
    """The part that names one of kvferry's connectors, also below a MultiConnector."""
    if transfer.get("kv_connector") == name:
        return transfer
    parts = _extra(transfer).get("connectors")
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict) and part.get("kv_connector") == name:
            return part
    return None


def settings(own: dict[str, Any]) -> config.Config:
    """Raises ConfigError."""
    return config.decode(own.get("kv_connector_extra_config") or {})


def _extra(transfer: dict[str, Any]) -> dict[str, Any]:
    extra = transfer.get("kv_connector_extra_config")
    return extra if isinstance(extra, dict) else {}


def check_transfer_config(transfer: dict[str, Any]) -> Iterator[Finding]:
    store, pd = own_config(transfer), own_config(transfer, TRANSFER_CONNECTOR)
    if store is None and pd is None:
        yield _wrong_connector(transfer.get("kv_connector"))
    if store is not None:
        yield from _check_store_connector(transfer, store)
    if pd is not None:
        yield from _check_transfer_connector(transfer, pd)


def _check_store_connector(transfer: dict[str, Any], own: dict[str, Any]) -> Iterator[Finding]:
    yield _check_policy(transfer, own, "a page that cannot be read is then a miss")
    yield _check_role(own, ("kv_both",))
    try:
        settings(own)
    except ConfigError as error:
        yield failed("settings", str(error), "see docs/configuration.md")
    else:
        yield passed("settings", "valid")


def _check_transfer_connector(transfer: dict[str, Any], own: dict[str, Any]) -> Iterator[Finding]:
    role = own.get("kv_role")
    if role != "kv_producer":
        yield _check_policy(transfer, own, "a transfer that fails is then computed here")
    yield _check_role(own, ("kv_producer", "kv_consumer", "kv_both"))
    yield from transfer_checks.check_settings(own.get("kv_connector_extra_config") or {}, role)


def _wrong_connector(name: Any) -> Finding:
    near = difflib.get_close_matches(str(name), MODULES, 1, 0.4) or [CONNECTOR]
    return failed(CHECK, f"kv_connector is {name!r}", f'"kv_connector": "{near[0]}"')


def _check_policy(transfer: dict[str, Any], own: dict[str, Any], gain: str) -> Finding:
    """The policy stands at the top, also with a MultiConnector."""
    policy = transfer.get("kv_load_failure_policy", "fail (vLLM's default)")
    if policy == "recompute" or _extra(own).get("allow_failed_requests") is True:
        return passed("kv_load_failure_policy", str(policy))
    cure = f'add "kv_load_failure_policy": "recompute": {gain}'
    return failed("kv_load_failure_policy", str(policy), cure)


def _check_role(own: dict[str, Any], roles: Sequence[str]) -> Finding:
    role = own.get("kv_role")
    if role in roles:
        return passed("kv_role", role)
    cure = " or ".join(f'"kv_role": "{known}"' for known in roles)
    return failed("kv_role", f"{role!r}", cure)
