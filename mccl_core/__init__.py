"""`mccl`: a torch.distributed backend for Macs on Ethernet.

Installing the package is enough: `torch.distributed.init_process_group("mccl")` works with no import. Where torch's
automatic loading of backends is off (TORCH_DEVICE_BACKEND_AUTOLOAD=0), `import mccl_core` registers it.

A group takes dense CPU tensors of any shape; those that are not contiguous go through a copy. Bytes move in every
dtype. Floating-point, integer and bool tensors are reduced by every reduce op that has a meaning for them, complex ones
by SUM, AVG and PREMUL_SUM; the result has the same bits on every rank. Calls block until the result is in the tensor;
with `async_op=True` they return a Work at once, and several may be in flight.

A call whose sizes, dtype or ranks do not fit raises ValueError, TypeError or RuntimeError before anything is sent. A
rank that is lost, late beyond the timeout, or makes another call ends the ops in flight on every rank with torch's
DistBackendError, whose text names that rank, its host, the op and what to do.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

from mccl_core._autoload import autoload, install_finder, require_backend, torch_will_autoload

if TYPE_CHECKING:
    from mccl_core.compression import Options
    from mccl_core.ddp import ddp_hook
    from mccl_core.faults import ErrorReport, last_error, require_healthy, shrink
    from mccl_core.flight import flight_record
    from mccl_core.metrics import get_metrics, log_metrics, reset_metrics
    from mccl_core.network import explain_network
    from mccl_core.planning import explain
    from mccl_core.prometheus import metrics_text

try:
    __version__ = metadata.version("mccl-fleet")
except metadata.PackageNotFoundError:  # built by CMake alone, without pip
    __version__ = "0+unknown"

__all__ = [
    "ErrorReport",
    "Options",
    "__version__",
    "ddp_hook",
    "explain",
    "explain_network",
    "flight_record",
    "get_metrics",
    "last_error",
    "log_metrics",
    "metrics_text",
    "require_backend",
    "require_healthy",
    "reset_metrics",
    "shrink",
]

_MODULE_OF = {
    "ErrorReport": "mccl_core.faults",
    "Options": "mccl_core.compression",
    "ddp_hook": "mccl_core.ddp",
    "explain": "mccl_core.planning",
    "explain_network": "mccl_core.network",
    "flight_record": "mccl_core.flight",
    "get_metrics": "mccl_core.metrics",
    "last_error": "mccl_core.faults",
    "log_metrics": "mccl_core.metrics",
    "metrics_text": "mccl_core.prometheus",
    "require_healthy": "mccl_core.faults",
    "reset_metrics": "mccl_core.metrics",
    "shrink": "mccl_core.faults",
}
"""What is imported when first asked for: these modules load torch."""


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


install_finder()
# Where `import torch` will register the backend by itself, a command line that needs no torch does not wait for it.
if __version__ == "0+unknown" or not torch_will_autoload():
    autoload()
