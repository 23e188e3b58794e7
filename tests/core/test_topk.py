"""topk: the largest elements of each rank, summed in the order of ranks; what was not sent comes later."""

from __future__ import annotations

import gc
import math
import resource
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.digests import digest
from support.ranks import run_ranks

import mccl_core


def topk_group(ratio: float, warmup: int = 0) -> dist.ProcessGroup:
    options = mccl_core.Options(compression="topk", topk_ratio=ratio, topk_warmup=warmup)
    return dist.new_group(backend="mccl", pg_options=options)


def gradient(rank: int, step: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    # Few values: many are of equal magnitude.
    return torch.randint(-50, 50, (count,), generator=generator).to(dtype) / 7


class Reference:
    """What all ranks should get, step by step."""

    def __init__(self, world: int, count: int, ratio: float, dtype: torch.dtype) -> None:
        self.residuals = [torch.zeros(count, dtype=dtype) for _ in range(world)]
        self.kept = math.ceil(ratio * count)

    def all_reduce(self, gradients: list[torch.Tensor], factor: float) -> torch.Tensor:
        total = torch.zeros_like(gradients[0])
        for residual, own in zip(self.residuals, gradients, strict=True):
            residual += own * factor
            # Of equal ones the first: a stable sort keeps their order.
            order = residual.float().abs().sort(descending=True, stable=True).indices[: self.kept]
            sent = residual[order].float().to(residual.dtype)
            total[order] += sent
            residual[order] -= sent
        return total


def steps(rank: int, world: int) -> list[str]:
    digests = []
    for dtype in (torch.float32, torch.float64):
        for op, factor in ((dist.ReduceOp.SUM, 1.0), (dist.ReduceOp.AVG, 1 / world)):
            for count, ratio in ((1, 0.01), (7, 0.5), (1000, 0.01), (70_001, 0.01), (300, 1.0)):
                group = topk_group(ratio)
                reference = Reference(world, count, ratio, dtype)
                bucket = torch.empty(count, dtype=dtype)
                for step in range(5):
                    gradients = [gradient(r, step, count, dtype) for r in range(world)]
                    bucket.copy_(gradients[rank])
                    dist.all_reduce(bucket, op=op, group=group)
                    expected = reference.all_reduce(gradients, torch.tensor(factor, dtype=dtype).item())
                    assert torch.equal(bucket, expected), f"{dtype}, {op}, {count}, step {step}"
                    digests.append(digest(bucket))
                dist.destroy_process_group(group)
    return digests


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_step_is_exactly_the_reference_on_all_ranks(world: int) -> None:
    digests = run_ranks(world, steps, timeout_s=120)
    assert all(other == digests[0] for other in digests)


@pytest.mark.slow
@pytest.mark.parametrize("world", [5, 6, 7, 8, 9])
def test_more_worlds(world: int) -> None:
    digests = run_ranks(world, steps, timeout_s=240)
    assert all(other == digests[0] for other in digests)


def bytes_on_the_wire(rank: int, world: int) -> float:
    group = topk_group(0.01, warmup=2)
    count = 1_000_000
    sent = []
    for step in range(3):
        bucket = gradient(rank, step, count, torch.float32)
        mccl_core.reset_metrics()
        dist.all_reduce(bucket, group=group)
        sent.append(mccl_core.get_metrics()["ops"]["all_reduce"]["sent_bytes"])
    assert sent[0] == sent[1] == pytest.approx(4 * count * 2 * (world - 1) / world), "the first two go whole"
    return sent[2] / sent[0]


def test_one_per_cent_of_the_elements_is_one_per_cent_of_the_bytes_for_each_rank() -> None:
    # 8 bytes an entry to world-1 others, against 4 bytes an element 2(world-1)/world times.
    world = 3
    assert run_ranks(world, bytes_on_the_wire) == [pytest.approx(0.01 * world, rel=1e-3)] * world


def views_of_one_storage(rank: int, world: int) -> None:
    """Each view of a storage, and several tensors at once, have residuals of their own."""
    group = topk_group(0.5)
    memory = torch.zeros(6)
    for begin, end in ((0, 2), (2, 4), (0, 4), (0, 2), (2, 4)):
        part = memory[begin:end]
        part.copy_(torch.arange(1.0, end - begin + 1))
        dist.all_reduce(part, group=group)
    # The second time the 1 of the first comes on top of 1 and is still the smaller one: 2 against 2 goes by the index.
    assert memory.tolist()[:4] == [2.0 * world, 0.0, 2.0 * world, 0.0]
    matrix = torch.tensor([[1.0, 4.0], [3.0, 2.0]]).t()
    dist.all_reduce(matrix, group=group)
    assert matrix.tolist() == [[0.0, 3.0 * world], [4.0 * world, 0.0]]


def test_residuals_belong_to_views() -> None:
    run_ranks(2, views_of_one_storage)


def not_finite(rank: int, world: int) -> None:
    group = topk_group(0.5)
    bucket = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0, 2.0, 3.0])
    dist.all_reduce(bucket, group=group)
    assert bucket[0].isnan() and bucket[1] == float("inf") and bucket[2] == float("-inf")
    assert bucket[3:].tolist() == [0.0, 0.0, 0.0]
    bucket.zero_()
    dist.all_reduce(bucket, group=group)
    assert bucket.tolist() == [0.0, 0.0, 0.0, world, 2.0 * world, 3.0 * world]


def test_nan_and_infinity_are_seen_once_by_all() -> None:
    run_ranks(2, not_finite)


def grown_mib(rank: int, world: int) -> float:
    """By how much the process has grown after many tensors, and groups, that are gone."""

    def run(group_count: int) -> int:
        for _ in range(group_count):
            group = topk_group(0.01)
            for _ in range(8):
                dist.all_reduce(torch.ones(2 << 20), group=group)
            dist.destroy_process_group(group)
            del group
            gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = run(3)  # what the engine and the allocator keep for reuse
    return (run(4) - before) / 1024


def test_residuals_go_with_their_tensors_and_groups() -> None:
    # Of 32 tensors of 8 MiB: 256 MiB, if residuals stayed.
    assert all(mib < 100 for mib in run_ranks(2, grown_mib))


def job(rank: int, world: int) -> Any:
    bucket = gradient(rank, 0, 100_000, torch.float32)
    dist.all_reduce(bucket)
    small = torch.ones(10)
    dist.all_reduce(small)
    assert torch.all(small == world)
    return int((bucket != 0).sum())


def test_a_job_can_ask_for_it() -> None:
    counts = run_ranks(2, job, MCCL_COMPRESSION="topk", MCCL_TOPK_RATIO="0.02", MCCL_TOPK_WARMUP="0")
    assert counts[0] == counts[1] and 0 < counts[0] <= 2 * 2000
