"""Changes one of Lightning's modules just after it was imported."""

from types import ModuleType


def install(module: ModuleType) -> None:
    """Makes `mccl_ddp` known to a freshly imported module of Lightning."""
