"""Groups that come and go leave nothing behind: no thread, no descriptor, no memory."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

CYCLES = 50
MOST_GROWTH_NBYTES = 1024 * 1024  # of the resident set, in the second half of the cycles
ELEMENTS = 100_000


def entries(folder: str) -> int:
    return len(list(Path("/proc/self", folder).iterdir()))


def resident_nbytes() -> int:
    """Without what the C library keeps to itself of memory that was freed: that depends on which threads freed it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cycles(rank: int, world: int) -> dict[str, list[int]]:
    """What the process holds after half of the cycles, and after all."""
    held: dict[str, list[int]] = {"threads": [], "Python's threads": [], "descriptors": [], "resident bytes": []}
    for cycle in range(1, CYCLES + 1):
        group = dist.new_group()
        tensor = torch.full((ELEMENTS,), float(rank))
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.full((ELEMENTS,), float(sum(range(world)))))
        dist.destroy_process_group(group)
        if cycle in (CYCLES // 2, CYCLES):
            held["threads"].append(entries("task"))
            held["Python's threads"].append(threading.active_count())
            held["descriptors"].append(entries("fd"))
            held["resident bytes"].append(resident_nbytes())
    return held


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, and asks glibc to trim its heap")
def test_groups_that_come_and_go_leave_nothing_behind() -> None:
    for rank, held in enumerate(run_ranks(3, cycles)):
        for what, (half, whole) in held.items():
            allowed = MOST_GROWTH_NBYTES if what == "resident bytes" else 0
            assert whole - half <= allowed, f"rank {rank}: {what} grew from {half} to {whole}"
