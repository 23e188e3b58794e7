"""What compression saves on a link: bytes that leave the hosts, and time."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
import torch.distributed as dist
from support.ranks import results_of

import mccl_core
from netns.network import KIB, MIB, Link, Network
from netns.ranks import ranks_on

WORLD = 4
NBYTES = 25_000_000
# The burst is the smallest that holds a gigabit; a queue of 1 MiB, as a switch's port has it.
GIGABIT = Link(rate_mbit=1000, burst_nbytes=72 * KIB, queue_nbytes=MIB)
ROUNDS = 15


def compressed_group() -> dist.ProcessGroup:
    return dist.new_group(backend="mccl", pg_options=mccl_core.Options(compression="bf16"))


def move(rank: int, world: int, compressed: bool, count: int) -> None:
    group = compressed_group() if compressed else dist.group.WORLD
    for _ in range(count):
        dist.all_reduce(torch.ones(NBYTES // 4), group=group)


def sent_by_all(network: Network, *, compressed: bool, count: int) -> int:
    before = sum(host.sent_nbytes() for host in network.hosts)
    with ranks_on(network.hosts, move, compressed, count) as ranks:
        results_of(ranks.outcomes(120))
    return sum(host.sent_nbytes() for host in network.hosts) - before


def test_half_the_bytes_leave_the_hosts() -> None:
    with Network(WORLD) as network:
        whole = sent_by_all(network, compressed=False, count=2)
        compressed = sent_by_all(network, compressed=True, count=2)
    print(f"bytes on the links, compressed to whole: {compressed / whole:.4f}")
    assert compressed <= 0.51 * whole


def timed(rank: int, world: int) -> dict[str, list[float]]:
    """Seconds of all-reduces of 25 MB, whole and compressed in turns, on the slowest rank."""
    groups = {"whole": dist.group.WORLD, "bf16": compressed_group()}
    tensor = torch.zeros(NBYTES // 4)
    times: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(ROUNDS):
        for name, group in groups.items():
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times[name].append(slowest.item())
    return times


@pytest.mark.alone
@pytest.mark.slow
def test_25_mb_are_all_reduced_nearly_twice_as_fast_on_a_gigabit() -> None:
    with Network(WORLD, mtu=9000) as network:
        network.shape(GIGABIT)
        with ranks_on(network.hosts, timed) as ranks:
            times = results_of(ranks.outcomes(240))[0]
    # The first of each warms up. The shortest are the link's own; whatever else the machine did adds to others.
    shortest = {name: min(values[1:]) for name, values in times.items()}
    median = {name: statistics.median(values[1:]) for name, values in times.items()}
    print(f"ms, shortest {shortest['whole'] * 1e3:.1f} to {shortest['bf16'] * 1e3:.1f}, "
          f"ratio {shortest['whole'] / shortest['bf16']:.3f}; median {median['whole'] * 1e3:.1f} to "
          f"{median['bf16'] * 1e3:.1f}, ratio {median['whole'] / median['bf16']:.3f}")  # fmt: skip
    assert shortest["whole"] / shortest["bf16"] >= 1.9
