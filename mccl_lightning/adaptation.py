"""Fleet mode: what an unmodified script's Trainer or Fabric is given instead of what it asked for.

A fleet worker runs one process on its host. So whatever devices and nodes the script names, it gets one
device, as many nodes as there are workers, DDP over mccl, and the worker's ranks.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mccl_lightning.cluster import cluster_environment, is_environment, listed
from mccl_lightning.environment import Launcher
from mccl_lightning.namespaces import Namespace
from mccl_lightning.strategy import NAME, VARIANTS, derived_class, is_ours

FIND_UNUSED = "find_unused_parameters_true"
_DEVICES_OF_THE_HOST = ("auto", "gpu", "cuda", "mps", None)


@dataclass(frozen=True)
class Adaptation:
    """The connector's arguments in fleet mode, and one line for the log."""

    arguments: dict[str, Any]
    summary: str


def adapt(asked: Mapping[str, Any], *, namespace: Namespace, launcher: Launcher) -> Adaptation:
    """Changes the arguments of a connector, given in full by name.

    A strategy object keeps its identity and all its settings but the cluster environment, the devices and the
    process group's backend, which the fleet decides.

    Raises:
        ValueError: the strategy or accelerator cannot run here; the text says what to use instead.
    """
    plugins = [
        *(plugin for plugin in listed(asked["plugins"]) if not is_environment(namespace, plugin)),
        cluster_environment(namespace, launcher),
    ]
    changed = {
        "strategy": _strategy(asked["strategy"], namespace),
        "accelerator": _accelerator(asked["accelerator"]),
        "devices": 1,
        "num_nodes": launcher.world_size,
        "plugins": plugins,
    }
    names = ("strategy", "accelerator", "devices", "num_nodes")
    before = ", ".join(f"{name}={_shown(asked[name])}" for name in names)
    after = ", ".join(f"{name}={_shown(changed[name])}" for name in names)
    return Adaptation({**asked, **changed}, f"mccl-fleet: {before} became {after}, with the worker's ranks")


def _strategy(asked: Any, namespace: Namespace) -> Any:
    if isinstance(asked, str):
        return _strategy_name(asked.lower())
    if isinstance(asked, importlib.import_module(namespace.strategies).DDPStrategy):
        return _adopted(asked, namespace)
    raise _refused(type(asked).__name__)


def _strategy_name(asked: str) -> str:
    if asked in VARIANTS:
        return asked
    if asked == "auto" or asked.split("_")[0] == "ddp":
        return f"{NAME}_{FIND_UNUSED}" if asked.endswith(FIND_UNUSED) else NAME
    raise _refused(asked)


def _adopted(strategy: Any, namespace: Namespace) -> Any:
    # The object changes its class rather than being rebuilt: no setting of it, and no method of a user's own
    # subclass, is lost.
    if not is_ours(strategy):
        asked: Any = type(strategy)
        strategy.__class__ = derived_class(asked)
    strategy._start_method = "popen"
    strategy._process_group_backend = None
    strategy._accelerator = None
    strategy.cluster_environment = None
    strategy.parallel_devices = None
    return strategy


def _accelerator(asked: Any) -> Any:
    name = asked if isinstance(asked, str) or asked is None else type(asked).__name__
    if name in ("cpu", "CPUAccelerator"):
        return asked
    if name in _DEVICES_OF_THE_HOST or name in ("CUDAAccelerator", "MPSAccelerator"):
        return "auto"
    raise ValueError(f"mccl-fleet: accelerator={name!r} does not run on this fleet; use 'auto', 'gpu' or 'cpu'")


def _refused(strategy: str) -> ValueError:
    return ValueError(
        f"mccl-fleet: strategy={strategy!r} does not run on this fleet, whose hosts hold one process and one"
        " device each; use strategy='ddp' or 'auto' (each host then holds the whole model)"
    )


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, (str, int, list, type(None))) else type(value).__name__
