"""Runs a function on N ranks, each a process of its own, forked from this one.

A rank that raises, dies or hangs fails the caller with the rank's own traceback; no process is left behind.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from support.rank_processes import Outcome, RankProcesses


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time."""


def results_of(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned.

    Raises:
        RankFailed: any rank did not return; the text holds all their errors.
    """
    bad = [f"--- rank {rank} ---\n{o.text}" for rank, o in enumerate(outcomes) if o.text]
    if bad:
        raise RankFailed("\n".join(bad))
    return [outcome.result for outcome in outcomes]


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str = "mccl",
    timeout_s: float = 60.0,
    **env: str,
) -> list[Any]:
    """Runs `function(rank, world, *args)` inside an initialised process group on each rank; returns the results.

    Raises:
        RankFailed: any rank did not return; the text holds all their errors.
    """
    outcomes = run_ranks_to_the_end(world, function, *args, backend=backend, timeout_s=timeout_s, patience_s=30, **env)
    return results_of(outcomes)


def run_ranks_to_the_end(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str = "mccl",
    timeout_s: float = 60.0,
    patience_s: float = 1.0,
    **env: str,
) -> list[Outcome]:
    """Like `run_ranks`, for tests in which ranks are meant to fail: returns how each one ended.

    Rank 0, which holds the store, leaves when all others have, or `patience_s` after its own end.
    """
    until = time.monotonic() + timeout_s
    with listening_socket() as listener:
        body = lambda rank: _rank(rank, world, listener, backend, function, args, env, patience_s)  # noqa: E731
        with RankProcesses(world, body) as ranks:
            outcomes = ranks.outcomes(timeout_s)
            ranks.let_go(max(0.0, min(15.0, until - time.monotonic())))
            return outcomes


@contextlib.contextmanager
def listening_socket() -> Iterator[socket.socket]:
    """A socket that already listens on a free loopback port: nobody can take the port in between."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(256)
        yield listener


def store_on(listener: socket.socket, rank: int, world: int) -> dist.TCPStore:
    """The ranks' store; rank 0 serves it on the listening socket."""
    return dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        world,
        is_master=rank == 0,
        timeout=timedelta(seconds=60),
        master_listen_fd=os.dup(listener.fileno()) if rank == 0 else None,
        wait_for_workers=False,
    )


def _rank(
    rank: int,
    world: int,
    listener: socket.socket,
    backend: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    env: dict[str, str],
    patience_s: float,
) -> Any:
    os.environ.update(env)
    torch.set_num_threads(1)
    store = store_on(listener, rank, world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    result = function(rank, world, *args)
    # Rank 0 holds the store: it leaves last.
    store.add("test/done", 1)
    if rank == 0:
        _wait_until(lambda: store.add("test/done", 0) == world, patience_s)
    dist.destroy_process_group()
    return result


def all_are_here(rank: int, world: int) -> None:
    """A barrier over the store, once in a process: no op of the group is in flight on anybody afterwards."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"test/here/{rank}", "1")
    store.wait([f"test/here/{other}" for other in range(world)])
    # Whoever dies next may hold the store: first all have to have its answer.
    store.add("test/all_here", 1)
    if rank == 0:
        _wait_until(lambda: store.add("test/all_here", 0) == world, 60)


def _wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.002)
