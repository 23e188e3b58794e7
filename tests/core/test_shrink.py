"""The survivors of a group agree on who is left and go on, without a restart."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_processes import Outcome, RankProcesses
from support.ranks import all_are_here, listening_socket, results_of, store_on
from torch.nn.parallel import DistributedDataParallel

import mccl_core

TIMEOUT_S = 60.0


def run(world: int, function: Callable[[int, int], Any], *, timeout_s: float = 30.0) -> list[Outcome]:
    """Runs it on each rank; a rank that has ended stays until all have, unless it was killed."""
    with listening_socket() as listener:

        def body(rank: int) -> Any:
            torch.set_num_threads(1)
            store = store_on(listener, rank, world)
            listener.close()
            dist.init_process_group(
                "mccl", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
            )
            dist.barrier()
            all_are_here(rank, world)
            return function(rank, world)

        with RankProcesses(world, body, hold=True) as ranks:
            outcomes = ranks.outcomes(TIMEOUT_S)
            ranks.let_go(15)
            return outcomes


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def until_it_fails() -> str:
    with pytest.raises(dist.DistBackendError) as info:
        while True:
            dist.all_reduce(torch.ones(1000))
    return str(info.value)


def check_group(old_ranks: list[int], rank: int) -> list[int]:
    """Every kind of thing that a program may do next; returns who is in the group, by their old ranks."""
    world = len(old_ranks)
    assert dist.get_world_size() == world and dist.get_rank() == old_ranks.index(rank)
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, rank)
    tensor = torch.full((300_000,), float(rank))
    dist.all_reduce(tensor)
    assert tensor[-1].item() == sum(old_ranks)
    dist.broadcast(tensor, world - 1)
    dist.barrier()
    group = dist.new_group()
    dist.all_reduce(tensor, group=group)
    return gathered


def survivors(outcomes: list[Outcome], stay: list[int]) -> None:
    for result in results_of([outcomes[rank] for rank in stay]):
        assert result == stay
    for rank, outcome in enumerate(outcomes):
        assert rank in stay or outcome.exit_code == -signal.SIGKILL, outcome.text


def two_die(rank: int, world: int) -> list[int]:
    if rank in (1, 3):
        die()
    until_it_fails()
    mccl_core.shrink()
    return check_group([0, 2, 4], rank)


def test_several_died() -> None:
    survivors(run(5, two_die), [0, 2, 4])


def rank_0_dies(rank: int, world: int) -> list[int]:
    if rank == 0:
        die()
    until_it_fails()
    mccl_core.shrink()
    return check_group([1, 2, 3], rank)


def test_rank_0_died_and_with_it_the_store() -> None:
    survivors(run(4, rank_0_dies), [1, 2, 3])


def torch_shrinks_without_rank_0(rank: int, world: int) -> list[int]:
    if rank == 0:
        die()
    until_it_fails()
    dist.distributed_c10d.shrink_group([0])
    return check_group([1, 2, 3], rank)


def test_torchs_own_shrink_group_works_too() -> None:
    survivors(run(4, torch_shrinks_without_rank_0), [1, 2, 3])


def one_after_the_other(rank: int, world: int) -> list[int]:
    for victim in (5, 0, 2):
        if rank == victim:
            die()
        until_it_fails()
        mccl_core.shrink()
    return check_group([1, 3, 4], rank)


def test_a_group_shrinks_again_and_again() -> None:
    survivors(run(6, one_after_the_other), [1, 3, 4])


def down_to_one(rank: int, world: int) -> list[int]:
    if rank == 0:
        die()
    until_it_fails()
    mccl_core.shrink()
    return check_group([1], rank)


def test_one_is_left() -> None:
    survivors(run(2, down_to_one), [1])


def dies_during_the_agreement(victim: int) -> Callable[[int, int], list[int]]:
    def body(rank: int, world: int) -> list[int]:
        if rank == 2:
            die()
        until_it_fails()
        if rank == victim:
            time.sleep(0.5)  # the others wait for its vote by now
            die()
        mccl_core.shrink()
        return check_group([other for other in range(world) if other not in (2, victim)], rank)

    return body


@pytest.mark.parametrize("victim", [0, 3], ids=["coordinator", "member"])
def test_one_more_dies_during_the_agreement(victim: int) -> None:
    survivors(run(5, dies_during_the_agreement(victim)), [rank for rank in range(5) if rank not in (2, victim)])


def votes_and_dies(rank: int, world: int) -> list[int]:
    if rank == 2:
        die()
    until_it_fails()
    if rank == 3:
        from mccl_core import _shrink

        _shrink.smaller_meeting = lambda *_: die()  # it has agreed, and never enters the new group
    mccl_core.shrink()
    return check_group([0, 1, 4], rank)


def test_one_more_dies_right_after_the_agreement() -> None:
    survivors(run(5, votes_and_dies), [0, 1, 4])


def disagree(rank: int, world: int) -> list[int] | str:
    if rank == 4:
        die()
    until_it_fails()
    if rank == 3:  # alive, but rank 1 wants it to go
        with pytest.raises(dist.DistBackendError) as info:
            mccl_core.shrink()
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(1))
        return str(info.value)
    mccl_core.shrink(ranks_to_exclude=[3] if rank == 1 else [])
    return check_group([0, 1, 2], rank)


def test_survivors_who_disagree_exclude_the_union_and_the_one_excluded_is_told() -> None:
    outcomes = run(5, disagree)
    told = outcomes.pop(3).result
    assert "excluded" in told and "3, 4" in told and "rank 0 on" in told, told
    assert outcomes.pop(3).exit_code == -signal.SIGKILL
    assert results_of(outcomes) == [[0, 1, 2]] * 3


def lists_that_differ(rank: int, world: int) -> list[int] | str:
    if rank in (2, 4):
        with pytest.raises(dist.DistBackendError) as info:
            dist.all_reduce(torch.ones(1))
        return str(info.value)
    with pytest.raises(dist.DistBackendError, match="agreed on 2, 4"):
        dist.distributed_c10d.shrink_group([2] if rank == 1 else [4])
    dist.distributed_c10d.shrink_group([2, 4])
    return check_group([0, 1, 3], rank)


def test_torchs_shrink_group_tells_all_where_their_lists_differ() -> None:
    outcomes = run(5, lists_that_differ)
    results_of(outcomes)
    assert [outcomes[rank].result for rank in (0, 1, 3)] == [[0, 1, 3]] * 3
    assert all("excluded" in outcomes[rank].result for rank in (2, 4)), outcomes


def healthy(rank: int, world: int) -> list[int] | None:
    assert mccl_core.shrink() is dist.group.WORLD  # nobody is lost
    if rank == 2:
        return None  # what torch asks of those who are to go
    group = dist.distributed_c10d.shrink_group([2])
    assert group is dist.group.WORLD
    return check_group([0, 1, 3], rank)


def test_a_group_without_a_fault_shrinks() -> None:
    outcomes = run(4, healthy)
    assert [outcome.result for outcome in outcomes] == [[0, 1, 3], [0, 1, 3], None, [0, 1, 3]], outcomes


def bad_lists(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="rank 7 is not in this group of 2"):
        mccl_core.shrink(ranks_to_exclude=[7])
    with pytest.raises(ValueError, match="cannot exclude itself"):
        mccl_core.shrink(ranks_to_exclude=[rank])
    dist.barrier()


def test_bad_lists_harm_nobody() -> None:
    results_of(run(2, bad_lists))


def nobody_answers(rank: int, world: int) -> str:
    if rank == 1:
        time.sleep(2)
        return ""
    with pytest.raises(dist.DistBackendError) as info:
        mccl_core.shrink(ranks_to_exclude=[2])
    return str(info.value)


def test_a_rank_that_never_calls_it_is_named() -> None:
    outcomes = run(3, lambda rank, world: nobody_answers(rank, world) if rank < 2 else "", timeout_s=1)
    assert "timeout" in outcomes[0].result and "rank(s) 1" in outcomes[0].result


STEPS = 12


def train(rank: int, world: int) -> tuple[int, list[float]]:
    """Loses rank 2 in the middle and goes on; the weights stay the same on all."""
    torch.manual_seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(50, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10))
    model = DistributedDataParallel(net)
    step = 0
    while step < STEPS:
        if rank == 2 and step == 5:
            die()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        try:
            loss = model(torch.randn(16, 50)).square().mean()
            loss.backward()
            optimizer.step()
            step += 1
        except dist.DistBackendError:
            mccl_core.shrink()
            model = DistributedDataParallel(net)  # which takes rank 0's weights
            steps = torch.tensor(step)  # one rank may have finished the step that another one has not
            dist.broadcast(steps, 0)
            step = int(steps)
        model.zero_grad()
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    assert not torch.isnan(weights).any()
    gathered = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, weights)
    assert all(torch.equal(other, weights) for other in gathered)
    return dist.get_world_size(), weights[:5].tolist()


def test_training_goes_on_with_identical_weights() -> None:
    outcomes = run(4, train)
    assert outcomes.pop(2).exit_code == -signal.SIGKILL
    results = results_of(outcomes)
    assert results == [results[0]] * 3 and results[0][0] == 3
