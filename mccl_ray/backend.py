"""The process group `mccl` for a Ray Train loop: `TorchTrainer(loop, torch_config=MCCLConfig(), …)`.

Jobs of `mccl-fleet submit` do not need it: their script makes the group, in a process of its own.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.air._internal.device_manager as device_managers
import torch
from ray.air._internal.device_manager.torch_device_manager import TorchDeviceManager
from ray.train.torch.config import TorchConfig, _TorchBackend

import mccl_core
from mccl_ray import environ
from mccl_ray.fleet import host_name
from mccl_ray.process import delete_after_this_process, write_private
from mccl_ray.secret import obtain

DEFAULT_TIMEOUT_S = 300


class FleetDeviceManager(TorchDeviceManager):  # type: ignore[misc,unused-ignore]
    """The device of a Mac is mps, of another machine the CPU; Ray has no plug for a device of its own."""

    def is_available(self) -> bool:
        return True

    def get_devices(self) -> list[Any]:
        return [torch.device("mps" if torch.backends.mps.is_available() else "cpu")]

    def set_device(self, device: Any) -> None:
        """Nothing to choose: a worker has one device."""

    def supports_stream(self) -> bool:
        return False

    def get_stream_context(self, stream: Any) -> Any:
        return _no_stream()


@dataclass
class MCCLConfig(TorchConfig):  # type: ignore[misc,unused-ignore]
    """Makes the default process group of the workers with `mccl`.

    Give each worker one Mac: `ScalingConfig(resources_per_worker={"pool:mac": 1},
    placement_strategy="SPREAD")`, never `use_gpu`. The group's secret is the controller's MCCL_SECRET_FILE
    or MCCL_SECRET, else a new one.
    """

    backend: str | None = "mccl"
    """torch.distributed's name of the backend."""
    timeout_s: int = DEFAULT_TIMEOUT_S
    """Seconds after which an operation that makes no progress fails."""

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        return MCCLBackend


class MCCLBackend(_TorchBackend):  # type: ignore[misc,unused-ignore]
    """Ray's torch backend, over workers that were made ready for `mccl`."""

    share_cuda_visible_devices = False

    def on_start(self, worker_group: Any, backend_config: MCCLConfig) -> None:
        """Prepares every worker and makes the group; blocks until all ranks have joined.

        Raises:
            RuntimeError: another package has registered `mccl` on a worker.
        """
        worker_group.execute(prepare_worker, obtain(environ.snapshot()))
        super().on_start(worker_group, backend_config)


def prepare_worker(secret: bytes) -> None:
    """Readies this worker's process: backend, device, and the secret in a file for its user alone."""
    mccl_core.require_backend()
    with device_managers._torch_device_manager_lock:
        device_managers._torch_device_manager = FleetDeviceManager()
    private = Path(tempfile.mkdtemp(prefix="mccl-worker-"))
    delete_after_this_process(private)  # Ray ends workers without running their exit handlers
    write_private(private / "secret", secret)
    environ.set_for_group(secret_file=private / "secret", host=host_name(ray.get_runtime_context().get_node_id()))


@contextmanager
def _no_stream() -> Any:
    yield
