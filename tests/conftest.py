"""Shared by all tests."""

from __future__ import annotations

import os
import signal

import pytest
import torch

# Ranks are forked from this process: a pool of OpenMP threads would not survive that.
torch.set_num_threads(1)

# Commands under test are interrupted: where this process was started in the background, they would inherit that SIGINT
# is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def torchruns_logs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where torchrun makes its folders: it leaves them in the system's temporary folder else."""
    os.environ["PET_LOG_DIR"] = str(tmp_path_factory.mktemp("torchrun"))
