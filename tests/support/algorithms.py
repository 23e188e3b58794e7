"""A process group for each all-reduce algorithm, so that a test meets all of them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist


def groups_by_algorithm(rank: int, world: int, pg_options: Any = None) -> dict[str, dist.ProcessGroup]:
    """A group for each algorithm that a world of this size can use; ranks take turns behind two switches."""
    # So that 64 KiB go in several chunks, also where that is a matter of cost: without latency they cost nothing.
    os.environ["MCCL_CHUNK_NBYTES"] = "16384"
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as profile:
        profile.write("latency_us: 1\nstep_us: 0\ngoodput_GBps: 1\n")
    os.environ["MCCL_LINK_PROFILE"] = profile.name
    os.environ["MCCL_SWITCH_GROUP"] = f"switch{rank % 2}"
    groups = {}
    for name in ["ring", "recursive_doubling", "two_level"] + (["circulant"] if world > 2 else []):
        os.environ["MCCL_ALLREDUCE_ALGO"] = name
        groups[name] = dist.new_group(backend="mccl", pg_options=pg_options)
    Path(profile.name).unlink()
    return groups
