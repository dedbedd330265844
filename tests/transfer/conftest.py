"""NIXL in the processes of these tests: what a machine without InfiniBand needs."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def transport():
    """With its module for InfiniBand, NIXL 1.5.1 crashes when a process ends: the wheel brings a
    libnl beside the machine's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,sm")
        patch.setenv("UCX_MODULES", "^ib")
        yield
