"""Bursts of asynchronous all-reduces of any size, on all algorithms at once, by ranks that are never in step."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from support.algorithms import groups_by_algorithm
from support.ranks import run_ranks

OPS = 640  # a rank
LONGEST_BURST = 80
MOST_ELEMENTS = 262_144  # 1 MiB of float32
LONGEST_PAUSE_S = 0.01


def summand(seed: int, count: int) -> torch.Tensor:
    """What rank 0 adds; rank r adds it 2**r times. Up to 8 ranks all sums are below 2**24, so exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 65536, (count,), generator=generator).float()


def bursts(rank: int, world: int, op_count: int) -> None:
    groups = groups_by_algorithm(rank, world)
    shared = random.Random(640)  # what all ranks agree on: sizes, algorithms, bursts
    own = random.Random(rank)  # what they do not: when they come
    posted = 0
    while posted < op_count:
        started = []
        for _ in range(min(shared.randint(1, LONGEST_BURST), op_count - posted)):
            count = int(MOST_ELEMENTS ** shared.random())
            name = shared.choice(list(groups))
            tensor = summand(posted, count) * 2**rank
            if own.random() < 0.1:
                time.sleep(own.uniform(0, LONGEST_PAUSE_S))
            work = dist.all_reduce(tensor, group=groups[name], async_op=True)
            started.append((posted, name, tensor, work))
            posted += 1
        for *_, work in started:
            work.wait()
        for seed, name, tensor, _ in started:
            expected = summand(seed, tensor.numel()) * (2**world - 1)
            assert torch.equal(tensor, expected), f"op {seed}, {name}, {tensor.numel()} elements"


def test_bursts_are_exact() -> None:
    run_ranks(4, bursts, OPS // 8, backend="gloo")


@pytest.mark.slow
def test_640_ops_on_8_ranks_are_exact() -> None:
    run_ranks(8, bursts, OPS, backend="gloo", timeout_s=250)
