"""Counts of what was moved, and that reading them never gets in the way of the engine."""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.ranks import run_ranks

import mccl_core


def counted(rank: int, world: int) -> None:
    mccl_core.reset_metrics()
    for _ in range(3):
        dist.all_reduce(torch.ones(100))
    dist.broadcast(torch.ones(7, dtype=torch.int64), 0)
    dist.barrier()
    ops = mccl_core.get_metrics()["ops"]
    assert ops["all_reduce"] == {"count": 3, "bytes": 1200, "sent_bytes": 1200}
    assert ops["broadcast"] == {"count": 1, "bytes": 56, "sent_bytes": 56 if rank == 0 else 0}
    assert ops["barrier"]["count"] == 1
    mccl_core.reset_metrics()
    assert mccl_core.get_metrics()["ops"]["all_reduce"] == {"count": 0, "bytes": 0, "sent_bytes": 0}


def test_ops_and_bytes_are_counted() -> None:
    run_ranks(2, counted)


def read_while_reducing(rank: int, world: int) -> None:
    # The engine's threads let go of tensors, which takes Python's interpreter lock, while this thread asks the engine.
    for _ in range(2000):
        work = dist.all_reduce(torch.ones(100), async_op=True)
        mccl_core.get_metrics()
        work.wait()
        del work


def test_metrics_can_be_read_at_any_time() -> None:
    run_ranks(2, read_while_reducing)


def test_there_are_none_before_the_first_group() -> None:
    assert mccl_core.get_metrics() == {"ops": {}, "parked_bytes": 0}
