"""What this layer asks of the backend, which is imported when first needed: Lightning loads without it."""

import importlib
import sys
from typing import Any

from torch import distributed

BACKEND = "mccl"


def require_backend() -> None:
    """Makes sure that the backend name `mccl` is registered, and by this project.

    Raises:
        RuntimeError: another package registered the name; the text says what to do.
        ImportError: mccl_core is not installed or was built for another torch.
    """
    _core().require_backend()


def name() -> str | None:
    """The backend of the default process group, None where there is none."""
    return distributed.get_backend() if distributed.is_initialized() else None


def require_healthy() -> None:
    """Returns where no group of this process that is on mccl is in error, the default one or another.

    Raises:
        torch.distributed.DistBackendError: one is, and has not been destroyed or shrunk.
    """
    if distributed.is_initialized() and "mccl_core._runtime" in sys.modules:
        _core().require_healthy()


def all_reduced() -> tuple[int, int] | None:
    """Bytes and number of this process's all-reduces so far; None where no device's group is on mccl."""
    if BACKEND not in (name() or ""):
        return None
    operation = _core().get_metrics()["ops"]["all_reduce"]
    return operation["bytes"], operation["count"]


def _core() -> Any:
    return importlib.import_module("mccl_core")
