"""Shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent
# Each of these starts Ray, which takes well-known ports.
RAY = {"cli", "ray"}

# Ranks are forked from this process: a pool of OpenMP threads would not survive that.
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers (`-n`): a file's tests stay together, and so do all that start Ray."""
    for item in items:
        path = item.path.relative_to(ROOT)
        item.add_marker(pytest.mark.xdist_group("ray" if path.parts[0] in RAY else str(path)))
