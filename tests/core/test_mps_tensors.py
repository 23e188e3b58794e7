"""Collectives on MPS tensors. Only on a Mac; elsewhere test_device_tensors.py shows what can be shown without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import device_collectives, mps_program

TESTS = Path(__file__).parents[1]


def require_mps() -> None:
    """Skips where there is no MPS; with MCCL_TEST_MPS=1, as on the macOS runners, that is an error."""
    if torch.backends.mps.is_available():
        return
    if os.environ.get("MCCL_TEST_MPS") == "1":
        pytest.fail("this machine has no MPS device, and MCCL_TEST_MPS=1 asks for one")
    pytest.skip("needs a Mac with MPS")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_collectives_and_ddp_on_mps() -> None:
    require_mps()
    # Processes of their own: Metal does not work in a forked one.
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={device_collectives.WORLD}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    program = [mps_program.__file__]
    done = subprocess.run([*launch, *program], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    for rank in range(device_collectives.WORLD):
        assert f"rank {rank} done" in done.stdout
