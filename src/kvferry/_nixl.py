"""The only importer of nixl: an agent with the few calls that kvferry needs, and no NIXL types.

NIXL comes as `nixl`, `nixl-cu12` or `nixl-cu13`, with one API. A handle here is whatever NIXL
gives; callers only pass it back. Errors are `NixlError`, with the name that NIXL has for them.
"""

import importlib
from array import array
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from kvferry.config import default_variable
from kvferry.errors import ConfigError

PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
DONE = "DONE"

Handle = Any


class Memory(NamedTuple):
    """Where memory lies. `index`: of a GPU, as the process counts those that it sees."""

    kind: str  # "DRAM" or "VRAM"
    index: int = 0


HOST = Memory("DRAM")
GPU_READS = ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "y")
"""Without NVLink UCX reads another process's GPU memory by way of the host, 50 times slower, unless
it is told not to."""


class NixlError(Exception):
    """`name`: NIXL's own class of the error, such as `nixlRemoteDisconnectError`."""

    def __init__(self, name: str, message: str):
        super().__init__(f"{name}: {message}")
        self.name = name


def find() -> ModuleType:
    """The installed API. Raises ConfigError that says what to install."""
    for package in PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError:
            continue
    raise ConfigError(
        "nixl.missing",
        "the transfer connector needs NIXL: install nixl-cu12 or nixl-cu13, for the CUDA version"
        " that vLLM has (either works on a machine without a GPU)",
    )


class Agent:
    """One NIXL agent. Calls are made by one thread at a time; each may raise NixlError.

    `memory`: all that it registers lies there.
    """

    def __init__(self, name: str, backends: Sequence[str], memory: Memory = HOST):
        """Creates the agent and its backends (tens of milliseconds to a second). ConfigError if a
        backend is not there. NIXL's own thread for progress is off: it spins, one core for each
        agent. Whoever owns the agent calls `state` and `received` often instead."""
        self._api = find()
        import numpy  # noqa: PLC0415  NIXL brings it; nobody else needs it

        self._numpy = numpy
        self._memory = memory
        if memory.kind != HOST.kind:
            default_variable(*GPU_READS)
        self._errors = tuple(
            value
            for key, value in vars(self._api.nixlBind).items()
            if key.startswith("nixl") and key.endswith("Error")
        )
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=list(backends))
        self._agent = self._call(self._api.nixl_agent, name, config)
        missing = [backend for backend in backends if backend not in self._agent.backends]
        if missing:
            raise ConfigError("nixl.backend", f"NIXL has no backend {', '.join(missing)} here")

    def plugins(self) -> dict[str, list[str]]:
        """What NIXL brings, by name, with the memory that each moves here: none where its own
        libraries are missing. Loads them all."""
        return {
            name: [kind.removesuffix("_SEG") for kind in self._agent.get_plugin_mem_types(name)]
            for name in self._call(self._agent.get_plugin_list)
        }

    def register(self, address: int, length_bytes: int) -> Handle:
        kind, index = self._memory
        rows = [(address, length_bytes, index, "")]
        return self._call(self._agent.register_memory, rows, kind)

    def deregister(self, registration: Handle) -> None:
        self._call(self._agent.deregister_memory, registration)

    def describe(self, ranges: Sequence[tuple[int, int]]) -> bytes:
        """How to reach this agent, and these ranges, each as it was registered."""
        kind, index = self._memory
        rows = [(address, length_bytes, index, "") for address, length_bytes in ranges]
        descriptors = self._api.nixlBind.nixlRegDList(self._agent.nixl_mems[kind], rows)
        return self._call(self._agent.get_partial_agent_metadata, descriptors, True)

    def add_peer(self, description: bytes) -> str:
        name = self._call(self._agent.add_remote_agent, description)
        return name.decode() if isinstance(name, bytes) else name

    def remove_peer(self, name: str) -> None:
        self._call(self._agent.remove_remote_agent, name)

    def table(
        self, peer: str, strides: Sequence[tuple[int, int, int, int]], memory: Memory
    ) -> Handle:
        """Strides: address, piece bytes, distance, count, in the peer's `memory`. `peer` "": own
        memory."""
        kind, index = memory
        rows = [(address, piece, index, step, count) for address, piece, step, count in strides]
        rows = self._numpy.array(rows, dtype=self._numpy.uint64)
        return self._call(self._agent.prep_xfer_dlist, peer, rows, kind)

    def drop_table(self, table: Handle) -> None:
        self._call(self._agent.release_dlist_handle, table)

    def make_post(
        self,
        operation: str,
        mine: Handle,
        own_indices: array,
        theirs: Handle,
        their_indices: array,
        notice: bytes = b"",
    ) -> Handle:
        """`operation`: READ or WRITE. `notice` arrives there after all its bytes."""
        as_numbers = self._numpy.frombuffer
        return self._call(
            self._agent.make_prepped_xfer,
            operation,
            mine,
            as_numbers(own_indices, dtype=self._numpy.int32),
            theirs,
            as_numbers(their_indices, dtype=self._numpy.int32),
            notice,
        )

    def backend(self, post: Handle) -> str:
        """Which one NIXL took for it."""
        return self._call(self._agent.query_xfer_backend, post)

    def begin(self, post: Handle) -> str:
        """Posts it. DONE, or not yet."""
        return self._call(self._agent.transfer, post)

    def state(self, post: Handle) -> str:
        return self._call(self._agent.check_xfer_state, post)

    def drop_post(self, post: Handle) -> None:
        """Only of one that has ended: this does not stop it."""
        self._call(self._agent.release_xfer_handle, post)

    def send(self, peer: str, content: bytes) -> None:
        self._call(self._agent.send_notif, peer, content)

    def received(self) -> list[tuple[str, bytes]]:
        """Sender, as NIXL says, and content of what has come since the last call."""
        return [
            (sender.decode(errors="replace") if isinstance(sender, bytes) else sender, content)
            for sender, contents in self._call(self._agent.get_new_notifs).items()
            for content in contents
        ]

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._errors as error:
            raise NixlError(type(error).__name__, str(error)) from error
