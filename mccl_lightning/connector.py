"""Wraps the connector, which turns a Trainer's or Fabric's arguments into a strategy.

Three things are added: fleet mode (`adaptation`); ranks from any launcher for `mccl_ddp`; and `mccl_ddp` on
MPS, where the connector refuses every strategy of the DDP family, by its name.
"""

import functools
import importlib
import inspect
from typing import Any

from mccl_lightning import environment
from mccl_lightning.adaptation import adapt
from mccl_lightning.cluster import cluster_environment, is_environment, listed
from mccl_lightning.environment import Launcher
from mccl_lightning.namespaces import Namespace
from mccl_lightning.strategy import is_ours


def wrap(module: Any, namespace: Namespace) -> None:
    """Replaces two methods of the connector class in a freshly imported module.

    Raises:
        AttributeError: this release of Lightning has no such class or method.
    """
    connector = getattr(module, namespace.connector_class)
    connector.__init__ = _initialize(connector.__init__, namespace)
    connector._check_config_and_set_final_flags = _check(connector._check_config_and_set_final_flags)


def _initialize(original: Any, namespace: Namespace) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
        fleet, launcher = environment.fleet(), environment.launcher()
        if fleet is not None:
            adaptation = adapt(arguments, namespace=namespace, launcher=Launcher.of_fleet(fleet))
            _rank_zero_info(namespace, adaptation.summary)
            arguments = adaptation.arguments
        elif launcher is not None and is_ours(arguments["strategy"]):
            arguments |= _launched(arguments, namespace, launcher)
        original(self, **arguments)

    return __init__


def _launched(arguments: dict[str, Any], namespace: Namespace, launcher: Launcher) -> dict[str, Any]:
    """Devices and nodes as launched, where the user left them out; a cluster environment if there is none."""
    changed: dict[str, Any] = {}
    if arguments["devices"] == "auto" and arguments["num_nodes"] == 1:
        changed = {"devices": launcher.local_world_size, "num_nodes": launcher.nodes}
    plugins = listed(arguments["plugins"])
    given = [getattr(arguments["strategy"], "cluster_environment", None), *plugins]
    if not any(is_environment(namespace, plugin) for plugin in given):
        changed["plugins"] = [*plugins, cluster_environment(namespace, launcher)]
    return changed


def _check(original: Any) -> Any:
    @functools.wraps(original)
    def check(self: Any, **kwargs: Any) -> None:
        strategy = kwargs["strategy"]
        if not is_ours(strategy):
            original(self, **kwargs)
            return
        # All but the strategy is checked as ever; what a strategy object brings along is passed by itself.
        original(self, **{**kwargs, **_unpacked(strategy, kwargs), "strategy": "auto"})
        self._strategy_flag = strategy.lower() if isinstance(strategy, str) else strategy

    return check


def _unpacked(strategy: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    if isinstance(strategy, str):
        return {}
    precision = getattr(strategy, "_precision_plugin", None) or getattr(strategy, "_precision", None)
    carried = [precision, strategy._checkpoint_io, strategy.cluster_environment]
    return {
        "plugins": [*listed(kwargs["plugins"]), *(plugin for plugin in carried if plugin is not None)],
        "accelerator": strategy._accelerator or kwargs["accelerator"],
    }


def _rank_zero_info(namespace: Namespace, text: str) -> None:
    importlib.import_module(f"{namespace.fabric}.utilities.rank_zero").rank_zero_info(text)
