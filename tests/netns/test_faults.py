"""Each fault on hosts of their own: every rank gets one error that names the culprit, at once, and can go on."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import all_are_here

from mccl_core import _runtime
from netns.errors import (
    CULPRIT,
    LONG_BEAT,
    REPORT_S,
    SOON_S,
    Seen,
    all_but_culprit,
    beat,
    check,
    go_on_in_a_new_group,
    others,
    reduce_in_a_new_group,
    reduce_until_it_fails,
    seen,
    wait_until_busy,
)
from netns.network import Network
from netns.ranks import ranks_on


def test_a_killed_rank(network: Network) -> None:
    with ranks_on(network.hosts, go_on_in_a_new_group, **LONG_BEAT) as ranks:
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
    closed_at = None
    if rank == CULPRIT:
        for _ in range(20):
            dist.all_reduce(torch.ones(1000))
        closed_at = time.monotonic()
        close_sockets()
    error = seen(reduce_until_it_fails)
    reduce_in_a_new_group(list(range(world)))
    return error if closed_at is None else replace(error, began_at=closed_at)


def test_closed_sockets(network: Network) -> None:
    with ranks_on(network.hosts, culprit_closes_its_sockets, **LONG_BEAT) as ranks:
        outcomes = ranks.outcomes(REPORT_S)
    # Both ends live, and either may be the first to blame the other; the text has both.
    errors = [check(outcome, "peer lost", names=None) for outcome in outcomes]
    assert all(re.search(rf"rank {CULPRIT}\b", error.text) for error in errors), errors
    took = max(error.at for error in errors) - outcomes[CULPRIT].result.began_at
    print(f"closed sockets, {len(network.hosts)} ranks: {took:.3f} s")
    assert took < SOON_S


def culprit_raises(rank: int, world: int) -> Seen | float:
    all_are_here(rank, world)
    if rank != CULPRIT:
        error = seen(reduce_until_it_fails)
        reduce_in_a_new_group(all_but_culprit(world))
        return error
    for _ in range(20):
        dist.all_reduce(torch.ones(1000))
    raised_at = time.monotonic()
    _runtime._stop()  # what the interpreter does at the end of a script that has raised
    return raised_at


def test_a_rank_that_raises(network: Network) -> None:
    with ranks_on(network.hosts, culprit_raises, **LONG_BEAT) as ranks:
        outcomes = ranks.outcomes(REPORT_S)
    took = max(check(outcome, "peer left").at for outcome in others(outcomes)) - outcomes[CULPRIT].result
    print(f"raised, {len(network.hosts)} ranks: {took:.3f} s")
    assert took < SOON_S


def culprit_aborts(rank: int, world: int) -> Seen:
    all_are_here(rank, world)
    if rank == CULPRIT:
        for _ in range(20):
            dist.all_reduce(torch.ones(1000))
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).abort()
        error = seen(lambda: [work.wait(), dist.all_reduce(torch.ones(1))])
    else:
        error = seen(reduce_until_it_fails)
    reduce_in_a_new_group(list(range(world)))
    return error


def test_an_abort(network: Network) -> None:
    with ranks_on(network.hosts, culprit_aborts, **LONG_BEAT) as ranks:
        outcomes = ranks.outcomes(REPORT_S)
    took = max(check(outcome, "aborted").at for outcome in others(outcomes)) - outcomes[CULPRIT].result.began_at
    print(f"abort, {len(network.hosts)} ranks: {took:.3f} s")
    assert took < SOON_S
    assert outcomes[CULPRIT].result.fields.kind == "aborted"


def mismatch(rank: int, world: int, what: str) -> Seen:
    all_are_here(rank, world)
    wrong = rank == CULPRIT

    def call() -> None:
        if what == "kind" and wrong:
            dist.broadcast(torch.ones(9), 0)
        elif what == "size":
            dist.all_reduce(torch.ones(10 if wrong else 9))
        elif what == "dtype":
            dist.all_reduce(torch.ones(9, dtype=torch.int32 if wrong else torch.float32))
        elif what == "root":
            dist.broadcast(torch.ones(9), 1 if wrong else 0)
            dist.barrier()  # the wrong root has sent, and has nothing to wait for before
        else:
            dist.all_reduce(torch.ones(9))

    error = seen(call)
    reduce_in_a_new_group(list(range(world)))
    return error


@pytest.mark.parametrize("what", ["kind", "size", "dtype", "root"])
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
    with ranks_on(network.hosts, body, **beat(0.6)) as ranks:
        outcomes = ranks.outcomes(REPORT_S)
    for outcome in outcomes:
        error = check(outcome, "mismatch", names=None)
        assert error.at - error.began_at < SOON_S
