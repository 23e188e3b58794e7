"""Tensors of 5 GB in every collective: beyond what 32 bits can count.

No such memory is needed: the tensor's addresses lead to the same 48 MiB again and again. So an element's value depends
on its place modulo 48 MiB, of which 4 GiB is no multiple: bytes that went 4 GiB wrong would show. Reductions take MAX,
which may see a value twice.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

PERIOD = 48 << 20
NBYTES = 106 * PERIOD  # 5.3e9
assert NBYTES > 5e9 and (1 << 32) % PERIOD

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="maps a memory file of Linux many times"),
    pytest.mark.timeout(600),
]


def folded(nbytes: int, pattern: torch.Tensor | None = None) -> torch.Tensor:
    """A uint8 tensor of `nbytes` over PERIOD bytes of memory, which hold `pattern` or zeros."""
    file = os.memfd_create("folded")
    os.ftruncate(file, PERIOD)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = libc.mmap(None, nbytes, 0, anonymous | 0x4000, -1, 0)  # PROT_NONE, MAP_NORESERVE
    fixed = 0x10
    for offset in range(0, nbytes, PERIOD):
        size = min(PERIOD, nbytes - offset)
        at = libc.mmap(base + offset, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | fixed, file, 0)
        assert at == base + offset, os.strerror(ctypes.get_errno())
    os.close(file)
    tensor = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(base), dtype=torch.uint8)
    if pattern is not None:
        tensor[:PERIOD] = pattern
    return tensor


def pattern(rank: int) -> torch.Tensor:
    return ((torch.arange(PERIOD, dtype=torch.int32) * (3 + 2 * rank)) % 251).to(torch.uint8)


def all_reduce(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = folded(NBYTES, pattern(rank))
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor, torch.maximum(pattern(0), pattern(1))


def reduce(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = folded(NBYTES, pattern(rank))
    dist.reduce(tensor, 0, op=dist.ReduceOp.MAX)
    return tensor, torch.maximum(pattern(0), pattern(1)) if rank == 0 else pattern(1)


def broadcast(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = folded(NBYTES, pattern(rank))
    dist.broadcast(tensor, 1)
    return tensor, pattern(1)


def send(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = folded(NBYTES, pattern(rank))
    if rank == 0:
        dist.send(tensor, 1)
    else:
        assert dist.recv(tensor) == 0
    return tensor, pattern(0)


# From here on the larger side has NBYTES, and a rank's part of it half.


def all_gather(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    output = folded(NBYTES)
    dist.all_gather_single(output, folded(NBYTES // 2, pattern(5)))
    return output, pattern(5)


def reduce_scatter(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    output = folded(NBYTES // 2)
    dist.reduce_scatter_single(output, folded(NBYTES, pattern(rank)), op=dist.ReduceOp.MAX)
    return output, torch.maximum(pattern(0), pattern(1))


def gather(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = folded(NBYTES // 2, pattern(5))
    outputs = [folded(NBYTES // 2) for _ in range(2)]
    dist.gather(tensor, outputs if rank == 0 else None, dst=0)
    return outputs[1] if rank == 0 else tensor, pattern(5)


def scatter(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    output = folded(NBYTES // 2)
    dist.scatter(output, [folded(NBYTES // 2, pattern(r)) for r in range(2)] if rank == 1 else None, src=1)
    return output, pattern(rank)


def all_to_all(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = [folded(NBYTES // 2) for _ in range(2)]
    dist.all_to_all(outputs, [folded(NBYTES // 2, pattern(10 * rank + r)) for r in range(2)])
    return outputs[1 - rank], pattern(10 * (1 - rank) + rank)


def checked(rank: int, world: int, collective: Any) -> None:
    dist.group.WORLD.set_timeout(timedelta(minutes=9))
    tensor, expected = collective(rank, world)
    assert torch.equal(tensor[:PERIOD], expected)
    assert torch.equal(tensor[-PERIOD:], expected)


@pytest.mark.parametrize(
    "collective",
    [all_reduce, reduce, broadcast, send, all_gather, reduce_scatter, gather, scatter, all_to_all],
)
def test_five_gigabytes(collective: Any) -> None:
    run_ranks(2, checked, collective, timeout_s=540)
