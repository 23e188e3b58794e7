"""Runs at the end of `import torch`: from then on, importing Lightning makes `mccl_ddp` known to it.

Only the standard library is imported here. The rest of this layer loads when Lightning itself is imported, so
that a script without Lightning pays nothing and cannot be broken by it.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

from mccl_lightning.namespaces import BY_MODULE


class LightningFinder(importlib.abc.MetaPathFinder):
    """Lets the other finders find Lightning's modules, and hooks each of them once it has executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in BY_MODULE:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, LightningFinder):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _install_after(spec.loader)
                return spec
        return None


def autoload() -> None:
    """Installs the finder, once, and hooks what has been imported already."""
    if any(isinstance(finder, LightningFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, LightningFinder())
    for name in BY_MODULE:
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _install(module)


def _install_after(loader: importlib.abc.Loader) -> None:
    # The loader belongs to this one module. Its type stays, since tools ask it for sources and resources.
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _install(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]


def _install(module: ModuleType) -> None:
    importlib.import_module("mccl_lightning.hooks").install(module)
