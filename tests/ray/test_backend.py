"""The process group of an ordinary Ray Train loop, made with `mccl` on a fleet of this machine."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from mccl_ray.backend import MCCLConfig
from mccl_ray.local_fleet import LocalFleet

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="two hosts on one machine"),
]


def add_ranks(config: dict[str, Any]) -> dict[str, Any]:
    """Sums over the ranks what only their order can give; returns what rank 0 found."""
    import torch
    import torch.distributed as dist
    from ray.train.torch import get_device

    tensor = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return {
        "sum": tensor.unique().tolist(),
        "world": dist.get_world_size(),
        "backend": dist.get_backend(),
        "device": str(get_device()),
        "secret_mode": Path(os.environ["MCCL_SECRET_FILE"]).stat().st_mode & 0o777,
        "secret": os.environ["MCCL_SECRET_FILE"],
        "host": os.environ["MCCL_HOST_NAME"],
    }


def test_a_loop_all_reduces_over_mccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    # Ray reads a process's token once, and this process may have been without.
    with LocalFleet(2, {**os.environ, "RAY_AUTH_MODE": "disabled"}) as fleet:
        ray.init(address=fleet.address, log_to_driver=False, logging_level="ERROR")
        try:
            trainer = TorchTrainer(
                add_ranks,
                train_loop_config={},
                torch_config=MCCLConfig(timeout_s=30),
                scaling_config=ScalingConfig(
                    num_workers=2, resources_per_worker={"pool:mac": 1}, placement_strategy="SPREAD"
                ),
                run_config=RunConfig(name="sum", storage_path=str(tmp_path)),
            )
            found = trainer.fit().return_value
        finally:
            ray.shutdown()
    deadline = time.monotonic() + 10
    while (secret := Path(found["secret"])).exists():
        assert time.monotonic() < deadline, f"{secret} outlived its worker"
        time.sleep(0.05)
    del found["secret"]
    assert found.pop("host") in ("local-mac-1", "local-mac-2")
    assert found == {"sum": [3.0], "world": 2, "backend": "mccl", "device": "cpu", "secret_mode": 0o600}
