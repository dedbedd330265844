"""The connectors inside vLLM: the only place that imports vLLM. This folder is the offload
connector, `pd/` the transfer connector (files of the same names), which shares what it can.

connector   the class that vLLM makes, once per role; delegates, never thinks
facade      the edge where our errors end
scheduler   what vLLM's scheduler says, to the planner
worker      what vLLM's worker says, to the jobs
request     a vLLM request as the planner sees it; adapters (LoRA) by their files
identity    who this rank is: what makes its bytes interchangeable with others'
weights     what makes two models' weights different
regions     where the bytes of the KV cache lie
refusals    what cannot be shared safely, refused at start with the reason
versions    all differences between vLLM's versions
stats       counters, on their way to vLLM's metrics
"""

import logging

CONNECTOR = "FerryStoreConnector"
TRANSFER_CONNECTOR = "FerryTransferConnector"
MODULES = {
    CONNECTOR: "kvferry.vllm_plugin.connector",
    TRANSFER_CONNECTOR: "kvferry.vllm_plugin.pd.connector",
}


def register() -> None:
    """Entry point of the group `vllm.general_plugins`: makes the connectors known by their class
    names. vLLM calls it in every process, possibly several times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    for name, module in MODULES.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)


def log_as_vllm() -> None:
    """What the layers below say stands in the engine's log with its time, not bare. Who has given
    `kvferry` handlers of his own keeps them. Each connector calls it when it is made: vLLM has set
    up its log by then, and may not have when it calls `register`."""
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    if not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
