"""mccl's all-reduce on four hosts: exact over shaped links, and what each rank sees when one is lost."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from support.rank_processes import Outcome, RankProcesses
from support.ranks import results_of

from netns.network import KIB, MIB, Link, Network
from netns.ranks import ranks_on
from netns.waiting import wait_until_sent, wait_until_silent

WORLD = 4
SHAPE = Link(rate_mbit=200, burst_nbytes=32 * KIB)
LARGE_NBYTES = 16 * MIB  # 24 MiB a host on the wire: about a second
STARTED_NBYTES = 2 * MIB  # so much has left a host: the all-reduce is under way
REPORT_S = 90.0


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(WORLD) as network:
        network.shape(SHAPE)
        yield network


def contribution(rank: int, nbytes: int) -> torch.Tensor:
    """Whole numbers, whose float32 sum is exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-1000, 1000, (nbytes // 4,), generator=generator).float()


def assert_exact(rank: int, world: int, *sizes: int) -> None:
    for nbytes in sizes:
        tensor = contribution(rank, nbytes)
        dist.all_reduce(tensor)
        expected = sum((contribution(r, nbytes).long() for r in range(world)), torch.zeros(1, dtype=torch.long))
        assert torch.equal(tensor.long(), expected), f"{nbytes} bytes"


def test_it_is_exact(network: Network) -> None:
    with ranks_on(network.hosts, assert_exact, KIB, MIB, 8 * MIB) as ranks:
        results_of(ranks.outcomes(REPORT_S))


@pytest.mark.slow
def test_it_is_exact_across_switch_groups() -> None:
    with Network(WORLD, groups=(2, 2), mtu=9000) as network:
        network.shape(SHAPE)
        network.shape_uplink(Link(rate_mbit=100, burst_nbytes=32 * KIB))
        with ranks_on(network.hosts, assert_exact, KIB, MIB, 8 * MIB) as ranks:
            results_of(ranks.outcomes(REPORT_S))


@pytest.mark.slow
def test_it_is_exact_where_packets_are_lost(network: Network) -> None:
    network.drop(network.hosts[1], share=0.01)
    with ranks_on(network.hosts, assert_exact, KIB, MIB, 8 * MIB) as ranks:
        results_of(ranks.outcomes(REPORT_S))


def lose_a_peer(rank: int, world: int) -> tuple[str, float]:
    """The error of an all-reduce that cannot end, and when it came."""
    dist.all_reduce(torch.ones(1))
    tensor = contribution(rank, LARGE_NBYTES)
    with pytest.raises(dist.DistBackendError) as info:
        dist.all_reduce(tensor)
    at = time.monotonic()
    assert torch.isnan(tensor).all(), "half a sum must not look like a result"
    return str(info.value), at


def assert_named(outcome: Outcome, names: str) -> float:
    assert outcome.text == "", outcome.text
    text, at = outcome.result
    assert re.search(names, text), text
    return float(at)


def test_a_rank_killed_during_an_all_reduce_is_named_by_all_others_soon(network: Network) -> None:
    lost = network.hosts[2]
    before = lost.sent_nbytes()
    with ranks_on(network.hosts, lose_a_peer, timeout_s=60) as ranks:
        wait_until_sent(lost, STARTED_NBYTES, before)
        killed_at = time.monotonic()
        ranks.signal(2, signal.SIGKILL)
        outcomes = ranks.outcomes(REPORT_S)
    assert outcomes.pop(2).exit_code == -signal.SIGKILL
    for outcome in outcomes:
        # A second, and room for a busy machine; far from the op's timeout, a minute.
        assert assert_named(outcome, r"rank 2 on h2") - killed_at < 10


def cut_off(network: Network) -> None:
    network.cut(network.hosts[2])


def part_neighbours(network: Network) -> None:
    network.drop(network.hosts[1], network.hosts[2])


@pytest.mark.slow
@pytest.mark.parametrize("part", [cut_off, part_neighbours])
def test_a_broken_path_ends_the_all_reduce_on_all_ranks_with_its_timeout(
    network: Network, part: Callable[[Network], None]
) -> None:
    # Nobody hears that a cable is out, and three heartbeats take 15 s: the op's own timeout has to end it.
    host = network.hosts[2]
    before = host.sent_nbytes()
    with ranks_on(network.hosts, lose_a_peer, timeout_s=6) as ranks:
        wait_until_sent(host, STARTED_NBYTES, before)
        part(network)
        outcomes = ranks.outcomes(REPORT_S)
    for outcome in outcomes:
        assert_named(outcome, r"rank \d on h\d")


@pytest.mark.slow
def test_a_link_that_is_mended_in_time_costs_nothing_but_time(network: Network) -> None:
    def interrupt(ranks: RankProcesses) -> None:
        network.cut(network.hosts[2])
        wait_until_silent(network.hosts)
        network.mend(network.hosts[2])

    exact_in_spite_of(network, interrupt)


@pytest.mark.slow
def test_a_rank_that_was_stopped_goes_on_exactly(network: Network) -> None:
    def interrupt(ranks: RankProcesses) -> None:
        ranks.signal(2, signal.SIGSTOP)
        wait_until_silent(network.hosts)
        ranks.signal(2, signal.SIGCONT)

    exact_in_spite_of(network, interrupt)


def exact_in_spite_of(network: Network, interrupt: Callable[[RankProcesses], None]) -> None:
    """Runs `interrupt(ranks)` in the middle of an all-reduce, which has to end with the exact sum."""
    before = network.hosts[2].sent_nbytes()
    with ranks_on(network.hosts, assert_exact, LARGE_NBYTES) as ranks:
        wait_until_sent(network.hosts[2], STARTED_NBYTES, before)
        interrupt(ranks)
        results_of(ranks.outcomes(REPORT_S))
