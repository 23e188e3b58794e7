"""The survivors of a fault go on in a smaller group, on hosts of their own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from support.rank_processes import Outcome, RankProcesses
from support.ranks import all_are_here, results_of

import mccl_core
from netns.errors import (
    CULPRIT,
    LONG_BEAT,
    REPORT_S,
    beat,
    reduce_until_it_fails,
    seen,
    wait_until_busy,
    wait_until_others_have_reported,
)
from netns.network import Network
from netns.ranks import ranks_on

BEAT = beat(0.6)


def go_on_with_the_others(rank: int, world: int, gone: Sequence[int]) -> tuple[list[int], float]:
    """Shrinks when the group fails; returns who is left, by their old ranks, and how long the shrinking took."""
    all_are_here(rank, world)
    error = seen(reduce_until_it_fails)
    if rank in gone:  # it lives: it was silent
        return [], 0.0
    assert error.fields.peer in gone, error.text
    began_at = time.monotonic()
    group = mccl_core.shrink()
    took = time.monotonic() - began_at
    assert group is dist.group.WORLD
    return who_is_here(rank), took


def who_is_here(rank: int) -> list[int]:
    """Every kind of thing that a program may do next; returns the old ranks of the group's members, in order."""
    world = dist.get_world_size()
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(gathered, torch.tensor([rank]))
    members = [int(value) for value in gathered]
    assert members[dist.get_rank()] == rank
    tensor = torch.full((300_000,), float(rank))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full_like(tensor, sum(members)))
    again = dist.new_group()  # needs a store, and rank 0 may have had it
    tensor.fill_(rank)
    dist.all_reduce(tensor, group=again)
    assert torch.equal(tensor, torch.full_like(tensor, sum(members)))
    return members


def check_survivors(outcomes: list[Outcome], gone: Sequence[int], what: str) -> None:
    stay = [rank for rank in range(len(outcomes)) if rank not in gone]
    results = results_of([outcomes[rank] for rank in stay])
    assert [members for members, _ in results] == [stay] * len(stay)
    print(f"shrink after {what}, {len(outcomes)} ranks: {max(took for _, took in results):.3f} s")


@pytest.mark.parametrize("gone", [[0], [CULPRIT], [0, CULPRIT]], ids=["rank 0", "a rank", "two ranks"])
def test_ranks_die_and_the_others_go_on(network: Network, gone: list[int]) -> None:
    with ranks_on(network.hosts, go_on_with_the_others, gone, **LONG_BEAT) as ranks:
        wait_until_busy(network)
        for rank in gone:
            ranks.signal(rank, signal.SIGKILL)
        outcomes = ranks.outcomes(REPORT_S)
    check_survivors(outcomes, gone, f"ranks {gone} were killed")


def stop(network: Network, ranks: RankProcesses) -> None:
    ranks.signal(CULPRIT, signal.SIGSTOP)


def cut(network: Network, ranks: RankProcesses) -> None:
    network.cut(network.hosts[CULPRIT])


@pytest.mark.parametrize("silence", [stop, cut])
def test_a_rank_falls_silent_and_the_others_go_on(
    network: Network, silence: Callable[[Network, RankProcesses], None]
) -> None:
    with ranks_on(network.hosts, go_on_with_the_others, [CULPRIT], **BEAT) as ranks:
        wait_until_busy(network)
        silence(network, ranks)
        wait_until_others_have_reported(ranks)
        ranks.signal(CULPRIT, signal.SIGCONT)
        outcomes = ranks.outcomes(REPORT_S)
    assert outcomes[CULPRIT].text == "", outcomes[CULPRIT].text  # it got its error
    check_survivors(outcomes, [CULPRIT], silence.__name__)


def one_more_dies_while_they_agree(rank: int, world: int, victim: int) -> tuple[list[int], float]:
    all_are_here(rank, world)
    seen(reduce_until_it_fails)
    if rank == victim:
        time.sleep(0.5)  # the others wait for its vote by now
        signal.raise_signal(signal.SIGKILL)
    began_at = time.monotonic()
    mccl_core.shrink()
    return who_is_here(rank), time.monotonic() - began_at


@pytest.mark.parametrize("victim", [0, 3], ids=["coordinator", "member"])
def test_one_more_dies_while_the_others_agree(network: Network, victim: int) -> None:
    with ranks_on(network.hosts, one_more_dies_while_they_agree, victim, **LONG_BEAT) as ranks:
        wait_until_busy(network)
        ranks.signal(CULPRIT, signal.SIGKILL)
        outcomes = ranks.outcomes(REPORT_S)
    check_survivors(outcomes, sorted([CULPRIT, victim]), f"rank {victim} died during the agreement")
