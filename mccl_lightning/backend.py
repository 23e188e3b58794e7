"""What this layer asks of the backend, which is imported when first needed: Lightning loads without it."""

import importlib
from typing import Any

BACKEND = "mccl"


def require_backend() -> None:
    """Makes sure that the backend name `mccl` is registered, and by this project.

    Raises:
        RuntimeError: another package registered the name; the text says what to do.
        ImportError: mccl_core is not installed or was built for another torch.
    """
    _core().require_backend()


def all_reduced() -> tuple[int, int]:
    """Bytes and number of this process's all-reduces over mccl so far."""
    operation = _core().get_metrics()["ops"].get("allreduce")
    return (operation["bytes"], operation["count"]) if operation else (0, 0)


def _core() -> Any:
    return importlib.import_module("mccl_core")
