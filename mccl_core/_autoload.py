"""Makes the backend `mccl` and the module `mccl` known, at the end of `import torch` (entry points `torch.backends`).

It must be cheap and must never raise: an exception here would break `import torch` for everybody. The engine, the
configuration and pydantic are imported when the first process group is made.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

BACKEND = "mccl"
DEVICES = ("cpu", "mps")


class GuideFinder(MetaPathFinder):
    """Serves `import mccl`, from guide.py, where no other finder knows a package of that name."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != BACKEND:
            return None
        return spec_from_file_location(BACKEND, Path(__file__).with_name("guide.py"))


def install_finder() -> None:
    """Makes `import mccl` possible. Idempotent."""
    if not any(isinstance(finder, GuideFinder) for finder in sys.meta_path):
        sys.meta_path.append(GuideFinder())  # last: a package of that name, if there is one, wins


def create_backend(options: Any, backend_options: Any = None) -> Any:
    """Builds the backend of one process group; called by torch.distributed on every rank of it.

    Args:
        options: torch's `_DistributedBackendOptions` (store, rank, size, timeout, group id).
        backend_options: the caller's `pg_options`: `mccl_core.Options` or None.
    """
    from mccl_core._backend import create

    return create(options, backend_options)


def autoload() -> None:
    """Registers both; no backend where torch has no distributed package. Warns where another package took the name."""
    install_finder()
    try:
        register()
    except Exception as error:  # whatever it is, `import torch` has to succeed
        warnings.warn(f"mccl_core could not register the backend 'mccl': {error}", RuntimeWarning, stacklevel=2)


def torch_will_autoload() -> bool:
    """Whether torch is still to be imported and will load the entry points of installed packages then."""
    return "torch" not in sys.modules and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0"


def register() -> None:
    """Registers `mccl` with torch.distributed. Idempotent.

    Raises:
        RuntimeError: another package has registered a backend of that name.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    plugin = dist.Backend._plugins.get(BACKEND.upper())
    if plugin is not None:
        if plugin.creator_fn is create_backend:
            return
        raise RuntimeError(_taken(plugin.creator_fn))
    dist.Backend.register_backend(BACKEND, create_backend, extended_api=True, devices=list(DEVICES))
    # torch leaves the default for mps at gloo, which cannot move MPS tensors.
    dist.Backend.default_device_backend_map["mps"] = BACKEND


def require_backend() -> None:
    """Makes sure that the name `mccl` means this package.

    Raises:
        RuntimeError: torch has no distributed package, or another package has registered `mccl`.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise RuntimeError("mccl needs torch.distributed, and this build of torch comes without it")
    register()


def _taken(creator: Any) -> str:
    owner = getattr(creator, "__module__", None) or repr(creator)
    return (
        f"the torch.distributed backend 'mccl' is already registered by {owner}; "
        "uninstall that package (its distribution is probably named mccl) or this one (mccl-fleet)"
    )
