"""Ranks that say nothing, or come too late: every other one gets an error that names them, after the time promised."""

from __future__ import annotations

import ctypes
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.rank_processes import RankProcesses
from support.ranks import all_are_here, results_of

from netns.errors import (
    CULPRIT,
    LONG_BEAT,
    REPORT_S,
    Seen,
    all_but_culprit,
    beat,
    check,
    go_on_in_a_new_group,
    go_on_until_it_fails,
    others,
    reduce_in_a_new_group,
    seen,
    wait_until_busy,
    wait_until_others_have_reported,
)
from netns.network import Network
from netns.ranks import ranks_on
from netns.waiting import Lateness

TIMEOUT_S = 4.0
TOLERANCE = 0.1  # of what is promised
BEAT_S = 0.6
# Long enough that a tenth of three is far above what a scheduler does; whatever it does is measured and allowed.
LONG_BEAT_S = 3.0


def stop(network: Network, ranks: RankProcesses) -> None:
    ranks.signal(CULPRIT, signal.SIGSTOP)


def cut(network: Network, ranks: RankProcesses) -> None:
    network.cut(network.hosts[CULPRIT])


@pytest.mark.parametrize("beat_s", [BEAT_S, pytest.param(LONG_BEAT_S, marks=pytest.mark.slow)])
@pytest.mark.parametrize("silence", [stop, cut])
def test_silence_is_an_error_within_three_heartbeats(
    network: Network, silence: Callable[[Network, RankProcesses], None], beat_s: float
) -> None:
    with ranks_on(network.hosts, go_on_in_a_new_group, **beat(beat_s)) as ranks, Lateness() as lateness:
        wait_until_busy(network)
        before = time.monotonic()
        silence(network, ranks)
        after = time.monotonic()
        if silence is stop:
            wait_until_others_have_reported(ranks)
            ranks.signal(CULPRIT, signal.SIGCONT)
        outcomes = ranks.outcomes(REPORT_S)
    errors = [check(outcome, "peer lost") for outcome in others(outcomes)]
    took = [(error.at - after) / beat_s for error in errors]
    print(
        f"{silence.__name__}, {len(network.hosts)} ranks, heartbeats of {beat_s} s: {min(took):.2f} to {max(took):.2f} "
        f"heartbeats; threads woke up to {lateness.worst_s:.3f} s late"
    )
    # What was heard last may be a heartbeat old when the silence begins.
    assert all(error.at - before > (2 - TOLERANCE) * beat_s and "silent" in error.text for error in errors)
    assert max(took) < 3 * (1 + TOLERANCE) + lateness.worst_s / beat_s
    # The one that was cut off says so of itself; the one that was stopped hears it from the others.
    check(outcomes[CULPRIT], "peer lost", names=CULPRIT if silence is cut else None)


def test_the_ops_timeout_ends_it_where_that_comes_first(network: Network) -> None:
    with ranks_on(network.hosts, go_on_until_it_fails, timeout_s=TIMEOUT_S, **LONG_BEAT) as ranks:
        with Lateness() as lateness:
            wait_until_busy(network)
            stopped_at = time.monotonic()
            ranks.signal(CULPRIT, signal.SIGSTOP)
            wait_until_others_have_reported(ranks)
        ranks.signal(CULPRIT, signal.SIGCONT)
        outcomes = ranks.outcomes(REPORT_S)
    took = [check(outcome, "timeout").at - stopped_at for outcome in others(outcomes)]
    print(f"stopped, timeout of {TIMEOUT_S} s, {len(network.hosts)} ranks: {min(took):.3f} to {max(took):.3f} s")
    assert min(took) > (1 - TOLERANCE) * TIMEOUT_S
    assert max(took) < (1 + TOLERANCE) * TIMEOUT_S + lateness.worst_s


def culprit_is_late(rank: int, world: int) -> Seen:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    all_are_here(rank, world)
    if rank == CULPRIT:
        time.sleep(2 * TIMEOUT_S)
    error = seen(lambda: dist.all_reduce(torch.ones(100_000), group=group))
    if rank != CULPRIT:
        reduce_in_a_new_group(all_but_culprit(world))
    return error


def test_a_timeout_names_the_late_rank_and_not_its_starved_neighbour(network: Network) -> None:
    with ranks_on(network.hosts, culprit_is_late) as ranks, Lateness() as lateness:
        outcomes = ranks.outcomes(REPORT_S)
    took = []
    for outcome in others(outcomes):
        error = check(outcome, "timeout")
        assert "has not joined" in error.text
        took.append(error.at - error.began_at)
    print(f"timeout of {TIMEOUT_S} s, {len(network.hosts)} ranks: {min(took):.3f} to {max(took):.3f} s")
    # Those who began a little later hear of the first one's timeout.
    assert min(took) > (1 - TOLERANCE) * TIMEOUT_S - lateness.worst_s
    assert max(took) < (1 + TOLERANCE) * TIMEOUT_S + lateness.worst_s
    check(outcomes[CULPRIT], "timeout")


def pipeline_starves(rank: int, world: int) -> Seen:
    """Each stage waits for the one before it; the first one waits for nobody and is late."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    all_are_here(rank, world)
    if rank == 0:
        time.sleep(2 * TIMEOUT_S)
        return seen(lambda: dist.send(torch.ones(1), 1, group=group))

    def receive() -> None:
        dist.recv(torch.ones(1), rank - 1, group=group)

    return seen(receive)


def test_a_timeout_in_a_pipeline_names_the_stage_that_is_late(network: Network) -> None:
    with ranks_on(network.hosts, pipeline_starves) as ranks:
        outcomes = ranks.outcomes(REPORT_S)
    for outcome in outcomes:
        check(outcome, "timeout", names=0)


def hold_interpreter_lock(duration_s: float) -> None:
    ctypes.PyDLL(None).usleep(round(duration_s * 1e6))


def long_backward(rank: int, world: int) -> None:
    """Much longer than three heartbeats without a collective, with Python's interpreter lock held for most of it."""
    dist.barrier()
    tensor = torch.ones(100_000)
    if rank != CULPRIT:
        dist.all_reduce(tensor, async_op=True)  # its work is dropped: the engine alone knows when it ends
        hold_interpreter_lock(6 * BEAT_S)
    else:
        hold_interpreter_lock(2 * BEAT_S)
        # It ends on the others while they hold the lock: what it lets go of there must not wait for that.
        dist.all_reduce(tensor)
        time.sleep(4 * BEAT_S)
    until = time.monotonic() + 6 * BEAT_S
    while time.monotonic() < until:
        pass
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    assert tensor[0].item() == world


def test_a_long_backward_is_not_silence(network: Network) -> None:
    with ranks_on(network.hosts, long_backward, **beat(BEAT_S)) as ranks:
        results_of(ranks.outcomes(REPORT_S))
