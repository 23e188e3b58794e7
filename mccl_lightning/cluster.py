"""A Lightning cluster environment that takes every rank from the launcher's variables."""

import functools
import importlib
from collections.abc import Iterable
from typing import Any

from mccl_lightning.environment import Launcher
from mccl_lightning.namespaces import Namespace


class LauncherEnvironment:
    """Ranks as the launcher gave them; mixed in before Lightning's ClusterEnvironment."""

    def __init__(self, launcher: Launcher) -> None:
        super().__init__()
        self.launcher = launcher

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        """Raises ValueError where the launcher did not say (it need not if it built the process group)."""
        if self.launcher.master_addr is None:
            raise ValueError("MASTER_ADDR is not set: the launcher that set RANK should say where rank 0 is")
        return self.launcher.master_addr

    @property
    def main_port(self) -> int:
        if self.launcher.master_port is None:
            raise ValueError("MASTER_PORT is not set: the launcher that set RANK should say where rank 0 is")
        return self.launcher.master_port

    @staticmethod
    def detect() -> bool:
        """Never chosen by itself: `connector` passes it where a launcher was found."""
        return False

    def world_size(self) -> int:
        return self.launcher.world_size

    def set_world_size(self, size: int) -> None:
        """The launcher has decided."""

    def global_rank(self) -> int:
        return self.launcher.rank

    def set_global_rank(self, rank: int) -> None:
        """The launcher has decided."""

    def local_rank(self) -> int:
        return self.launcher.local_rank

    def node_rank(self) -> int:
        return self.launcher.node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raises ValueError where the Trainer's devices and nodes do not make up the launcher's world."""
        if num_devices * num_nodes != self.launcher.world_size:
            raise ValueError(
                f"devices={num_devices} times num_nodes={num_nodes} is {num_devices * num_nodes} processes,"
                f" but the launcher started {self.launcher.world_size}: leave both out to run as launched"
            )


@functools.cache
def _environment_class(namespace: Namespace) -> type[Any]:
    return type("LauncherEnvironment", (LauncherEnvironment, _base(namespace)), {"__module__": __name__})


def cluster_environment(namespace: Namespace, launcher: Launcher) -> Any:
    """The environment as one copy of Lightning wants it."""
    return _environment_class(namespace)(launcher)


def listed(plugins: Any) -> list[Any]:
    """A Trainer's `plugins` argument (None, one, or several) as a list."""
    if plugins is None:
        return []
    return list(plugins) if isinstance(plugins, Iterable) else [plugins]


def is_environment(namespace: Namespace, plugin: Any) -> bool:
    """True for a cluster environment of this copy of Lightning."""
    return isinstance(plugin, _base(namespace))


def _base(namespace: Namespace) -> type[Any]:
    return importlib.import_module(f"{namespace.fabric}.plugins.environments").ClusterEnvironment
