"""Which address this process listens on, and why."""

from __future__ import annotations

from mccl_core._network import LOOPBACK, NetworkChoice, NetworkError, choose
from mccl_core._runtime import current_runtime
from mccl_core.config import CoreConfig, master_host

__all__ = ["NetworkChoice", "NetworkError", "explain_network"]


def explain_network(master_addr: str | None = None) -> NetworkChoice:
    """Says which address this process listens on, and why.

    Before the first process group it is what one would choose now, with `master_addr` (MASTER_ADDR by default, else
    this machine) as the store's host.

    Raises:
        NetworkError: no address can be chosen; the text names the variable and lists the interfaces.
        SettingsError: an MCCL_* variable cannot be used.
    """
    runtime = current_runtime()
    if runtime is not None and master_addr is None:
        return runtime.network
    return choose(CoreConfig.from_environment(), master_addr or master_host() or LOOPBACK)
