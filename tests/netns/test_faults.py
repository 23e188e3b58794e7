"""Each fault on hosts of their own: every rank gets one error that names the culprit, in time."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.rank_processes import Outcome, RankProcesses
from support.ranks import all_are_here, results_of

import mccl_core
from mccl_core import _runtime
from netns.network import Network
from netns.ranks import ranks_on
from netns.waiting import wait_until_sent

WORLDS = [4, pytest.param(8, marks=pytest.mark.slow)]
CULPRIT = 2
FLOWING_NBYTES = 40_000  # so much has left a host: ops are under way
BEAT_S = 0.6
SHORT_BEAT = {"MCCL_HEARTBEAT_INTERVAL_MS": str(round(BEAT_S * 1000))}
LONG_BEAT = {"MCCL_HEARTBEAT_INTERVAL_MS": "60000"}  # silence is not what ends these
SOON_S = 10.0  # for what takes a second at most, on a busy machine; far from a minute
REPORT_S = 90.0


@dataclass
class Seen:
    """The error that a rank got, and when."""

    text: str
    fields: mccl_core.ErrorReport
    at: float
    began_at: float


@pytest.fixture(params=WORLDS)
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    with Network(request.param) as network:
        yield network


def seen(call: Callable[[], object]) -> Seen:
    """Runs a call that must end with a DistBackendError."""
    began_at = time.monotonic()
    with pytest.raises(dist.DistBackendError) as info:
        call()
    fields = mccl_core.last_error()
    assert fields is not None
    return Seen(str(info.value), fields, time.monotonic(), began_at)


def reduce_for_ever() -> None:
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
    while True:
        works.append(dist.all_reduce(torch.ones(1000), async_op=True))
        works.pop(0).wait()


def go_on_until_it_fails(rank: int, world: int) -> Seen:
    all_are_here(rank, world)
    return seen(reduce_for_ever)


def check(outcome: Outcome, kind: str, *, names: int | None = CULPRIT) -> Seen:
    """The rank lived to see an error of this kind that names the culprit, its host, the op, its ticket, a remedy.

    With `names` None it may name another rank.
    """
    assert outcome.text == "", outcome.text
    seen: Seen = outcome.result
    assert seen.fields.kind == kind, seen.text
    assert seen.fields.op and seen.fields.ticket > 0, seen
    assert f"{seen.fields.op} #{seen.fields.ticket}: {kind}" in seen.text
    assert seen.fields.advice and seen.text.endswith(seen.fields.advice)
    assert f"rank {seen.fields.peer} on h{seen.fields.peer}" in seen.text
    if names is not None:
        assert seen.fields.peer == names, seen.text
    return seen


def others(outcomes: list[Outcome]) -> list[Outcome]:
    return [outcome for rank, outcome in enumerate(outcomes) if rank != CULPRIT]


def wait_until_busy(network: Network) -> None:
    host = network.hosts[CULPRIT]
    wait_until_sent(host, FLOWING_NBYTES, host.sent_nbytes())


def test_a_killed_rank(network: Network) -> None:
    with ranks_on(network.hosts, go_on_until_it_fails, **LONG_BEAT) as ranks:
        wait_until_busy(network)
        killed_at = time.monotonic()
        ranks.signal(CULPRIT, signal.SIGKILL)
        outcomes = ranks.outcomes(REPORT_S)
    took = [check(outcome, "peer lost").at - killed_at for outcome in others(outcomes)]
    print(f"SIGKILL, {len(network.hosts)} ranks: {max(took):.3f} s")
    assert max(took) < SOON_S


def close_sockets() -> None:
    """Shuts down every connection of the engine: what a middlebox or a crash of the network stack does."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as sock:
                if sock.family != socket.AF_INET:
                    continue
                ports = sock.getsockname()[1], sock.getpeername()[1]
                if any(29600 <= port < 29700 for port in ports):
                    sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # not a connected one
            continue


def culprit_closes_its_sockets(rank: int, world: int) -> Seen:
    all_are_here(rank, world)
    if rank == CULPRIT:
        for _ in range(20):
            dist.all_reduce(torch.ones(1000))
        closed_at = time.monotonic()
        close_sockets()
        return replace(seen(reduce_for_ever), began_at=closed_at)
    return seen(reduce_for_ever)


def test_closed_sockets(network: Network) -> None:
    with ranks_on(network.hosts, culprit_closes_its_sockets, **LONG_BEAT) as ranks:
        outcomes = ranks.outcomes(REPORT_S)
    # Both ends live, and either may be the first to blame the other; the text has both.
    errors = [check(outcome, "peer lost", names=None) for outcome in outcomes]
    assert all(re.search(rf"rank {CULPRIT}\b", error.text) for error in errors), errors
    times = [error.at for error in errors]
    print(f"closed sockets, {len(network.hosts)} ranks: {max(times) - outcomes[CULPRIT].result.began_at:.3f} s")
    assert max(times) - outcomes[CULPRIT].result.began_at < SOON_S


def culprit_raises(rank: int, world: int) -> Seen | float:
    all_are_here(rank, world)
    if rank != CULPRIT:
        return seen(reduce_for_ever)
    for _ in range(20):
        dist.all_reduce(torch.ones(1000))
    _runtime._stop()  # what the interpreter does at the end of a script that has raised
    return time.monotonic()


def test_a_rank_that_raises(network: Network) -> None:
    with ranks_on(network.hosts, culprit_raises, **LONG_BEAT) as ranks:
        outcomes = ranks.outcomes(REPORT_S)
    for outcome in others(outcomes):
        assert check(outcome, "peer left").at - outcomes[CULPRIT].result < SOON_S


def culprit_aborts(rank: int, world: int) -> Seen:
    all_are_here(rank, world)
    if rank == CULPRIT:
        for _ in range(20):
            dist.all_reduce(torch.ones(1000))
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).abort()
        return seen(lambda: [work.wait(), dist.all_reduce(torch.ones(1))])
    return seen(reduce_for_ever)


def test_an_abort(network: Network) -> None:
    with ranks_on(network.hosts, culprit_aborts, **LONG_BEAT) as ranks:
        outcomes = ranks.outcomes(REPORT_S)
    for outcome in others(outcomes):
        assert check(outcome, "aborted").at - outcomes[CULPRIT].result.began_at < SOON_S
    assert outcomes[CULPRIT].result.fields.kind == "aborted"


TIMEOUT_S = 4.0


def culprit_is_late(rank: int, world: int) -> Seen:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    all_are_here(rank, world)
    if rank == CULPRIT:
        time.sleep(2 * TIMEOUT_S)
    return seen(lambda: dist.all_reduce(torch.ones(100_000), group=group))


def test_a_timeout_names_the_late_rank_and_not_its_starved_neighbour(network: Network) -> None:
    with ranks_on(network.hosts, culprit_is_late) as ranks:
        outcomes = ranks.outcomes(REPORT_S)
    for outcome in others(outcomes):
        error = check(outcome, "timeout")
        assert "has not joined" in error.text
        assert 0.95 * TIMEOUT_S < error.at - error.began_at < 2 * TIMEOUT_S
    took = max(outcome.result.at - outcome.result.began_at for outcome in others(outcomes))
    print(f"timeout of {TIMEOUT_S} s, {len(network.hosts)} ranks: {took:.3f} s")
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


def mismatch(rank: int, world: int, what: str) -> Seen:
    all_are_here(rank, world)
    wrong = rank == CULPRIT
    if what == "kind":
        return seen(lambda: dist.broadcast(torch.ones(9), 0) if wrong else dist.all_reduce(torch.ones(9)))
    if what == "size":
        return seen(lambda: dist.all_reduce(torch.ones(10 if wrong else 9)))
    return seen(lambda: dist.all_reduce(torch.ones(9, dtype=torch.int32 if wrong else torch.float32)))


@pytest.mark.parametrize("what", ["kind", "size", "dtype"])
def test_a_mismatch(network: Network, what: str) -> None:
    with ranks_on(network.hosts, mismatch, what, **LONG_BEAT) as ranks:
        outcomes = ranks.outcomes(REPORT_S)
    for outcome in outcomes:
        # Either side may see it first; the text has both.
        error = check(outcome, "mismatch", names=None)
        assert "where rank" in error.text and error.at - error.began_at < SOON_S


def nobody_sends(rank: int, world: int) -> Seen:
    all_are_here(rank, world)
    # Ranks 0 and 1 expect bytes from rank 2, all others expect them from rank 0.
    return seen(lambda: dist.broadcast(torch.ones(9), 2 if rank < 2 else 0))


def one_sends_less(rank: int, world: int) -> Seen:
    all_are_here(rank, world)

    def exchange() -> None:
        sent = [1] * world
        received = [1] * world
        if rank == CULPRIT:
            sent[0] = 0  # and rank 0 expects one
        dist.all_to_all_single(torch.empty(sum(received)), torch.ones(sum(sent)), received, sent)
        dist.barrier()
        dist.barrier()

    return seen(exchange)


@pytest.mark.parametrize("body", [nobody_sends, one_sends_less])
def test_a_mismatch_in_which_nothing_is_sent(network: Network, body: Callable[[int, int], Seen]) -> None:
    with ranks_on(network.hosts, body, **SHORT_BEAT) as ranks:
        outcomes = ranks.outcomes(REPORT_S)
    for outcome in outcomes:
        error = check(outcome, "mismatch", names=None)
        assert error.at - error.began_at < SOON_S


def stop(network: Network, ranks: RankProcesses) -> None:
    ranks.signal(CULPRIT, signal.SIGSTOP)


def cut(network: Network, ranks: RankProcesses) -> None:
    network.cut(network.hosts[CULPRIT])


@pytest.mark.parametrize("silence", [stop, cut])
def test_silence(network: Network, silence: Callable[[Network, RankProcesses], None]) -> None:
    with ranks_on(network.hosts, go_on_until_it_fails, **SHORT_BEAT) as ranks:
        wait_until_busy(network)
        before = time.monotonic()
        silence(network, ranks)
        after = time.monotonic()
        if silence is stop:
            wait_until_others_have_reported(ranks)
            ranks.signal(CULPRIT, signal.SIGCONT)
        outcomes = ranks.outcomes(REPORT_S)
    errors = [check(outcome, "peer lost") for outcome in others(outcomes)]
    took = [(error.at - after) / BEAT_S for error in errors]
    print(f"{silence.__name__}, {len(network.hosts)} ranks: {min(took):.2f} to {max(took):.2f} heartbeats")
    assert all((error.at - before) / BEAT_S > 1.8 and "silent" in error.text for error in errors)
    assert max(took) < 3.3 + 2  # and room for a busy machine
    # The one that was cut off says so of itself; the one that was stopped hears it from the others.
    check(outcomes[CULPRIT], "peer lost", names=CULPRIT if silence is cut else None)


def wait_until_others_have_reported(ranks: RankProcesses) -> None:
    """The stopped rank cannot: it is let on only when all others have seen the silence."""
    until = time.monotonic() + REPORT_S
    pipes = [pipe for rank, pipe in enumerate(ranks._pipes) if rank != CULPRIT]
    assert all(pipe.poll(max(0.0, until - time.monotonic())) for pipe in pipes)


def test_the_ops_timeout_ends_it_where_that_comes_first(network: Network) -> None:
    with ranks_on(network.hosts, go_on_until_it_fails, timeout_s=TIMEOUT_S, **LONG_BEAT) as ranks:
        wait_until_busy(network)
        stopped_at = time.monotonic()
        ranks.signal(CULPRIT, signal.SIGSTOP)
        wait_until_others_have_reported(ranks)
        ranks.signal(CULPRIT, signal.SIGCONT)
        outcomes = ranks.outcomes(REPORT_S)
    for outcome in others(outcomes):
        assert 0.9 * TIMEOUT_S < check(outcome, "timeout").at - stopped_at < 2 * TIMEOUT_S


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
    with ranks_on(network.hosts, long_backward, **SHORT_BEAT) as ranks:
        results_of(ranks.outcomes(REPORT_S))


def go_on_without_rank_0(rank: int, world: int) -> tuple[int, int, float, list[float]]:
    all_are_here(rank, world)
    first = seen(reduce_for_ever)
    began_at = time.monotonic()
    group = mccl_core.shrink()
    took = time.monotonic() - began_at
    assert first.fields.peer == 0, first.text
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor)
    gathered = [torch.zeros(1) for _ in range(world - 1)]
    dist.all_gather(gathered, torch.full((1,), float(rank)))
    again = dist.new_group()  # needs a store, and rank 0 had it
    dist.all_reduce(tensor, group=again)
    assert group is dist.group.WORLD
    return dist.get_rank(), dist.get_world_size(), took, [value.item() for value in gathered]


def test_rank_0_dies_and_the_others_go_on(network: Network) -> None:
    world = len(network.hosts)
    with ranks_on(network.hosts, go_on_without_rank_0, **LONG_BEAT) as ranks:
        wait_until_busy(network)
        ranks.signal(0, signal.SIGKILL)
        outcomes = ranks.outcomes(REPORT_S)
    results = results_of(outcomes[1:])
    assert [result[:2] for result in results] == [(number, world - 1) for number in range(world - 1)]
    assert all(result[3] == [float(rank) for rank in range(1, world)] for result in results)
    print(f"shrink without rank 0, {world} ranks: {max(result[2] for result in results):.3f} s")
