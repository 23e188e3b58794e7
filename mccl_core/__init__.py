"""`mccl`: a torch.distributed backend for Macs on Ethernet.

Installing the package is enough: `torch.distributed.init_process_group("mccl")` works with no import. Where torch's
automatic loading of backends is off (TORCH_DEVICE_BACKEND_AUTOLOAD=0), `import mccl_core` registers it.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

from mccl_core._autoload import autoload, require_backend, torch_will_autoload

if TYPE_CHECKING:
    from mccl_core.compression import Options
    from mccl_core.metrics import get_metrics, reset_metrics
    from mccl_core.planning import explain

try:
    __version__ = metadata.version("mccl-fleet")
except metadata.PackageNotFoundError:  # built by CMake alone, without pip
    __version__ = "0+unknown"

__all__ = ["Options", "__version__", "explain", "get_metrics", "require_backend", "reset_metrics"]


def __getattr__(name: str) -> Any:
    if name in ("get_metrics", "reset_metrics"):
        from mccl_core import metrics

        return getattr(metrics, name)
    if name == "explain":
        from mccl_core.planning import explain

        return explain
    if name == "Options":
        from mccl_core.compression import Options

        return Options
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Where `import torch` will register the backend by itself, a command line that needs no torch does not wait for it.
if __version__ == "0+unknown" or not torch_will_autoload():
    autoload()
