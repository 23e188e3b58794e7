"""Runs a function on N ranks, each a process of its own, forked from this one.

The forking process holds torch but no engine, so that a rank costs a fork and not an import. A rank that raises, dies
or hangs fails the caller with the rank's own traceback; no process is left behind.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time."""


@dataclass
class Outcome:
    """How one rank ended: its result, or the error that it raised, or the signal that ended it."""

    result: Any = None
    error: BaseException | None = None
    text: str = ""
    exit_code: int | None = None


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
    bad = [f"--- rank {rank} ---\n{o.text}" for rank, o in enumerate(outcomes) if o.text]
    if bad:
        raise RankFailed("\n".join(bad))
    return [outcome.result for outcome in outcomes]


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
    with listening_socket() as listener:
        return _collect(
            world,
            lambda rank: _rank(rank, world, listener, backend, function, args, env, patience_s),
            timeout_s,
        )


@contextlib.contextmanager
def listening_socket() -> Iterator[socket.socket]:
    """A socket that already listens on a free loopback port: nobody can take the port in between."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(256)
        yield listener


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
    store = dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        world,
        is_master=rank == 0,
        timeout=timedelta(seconds=60),
        master_listen_fd=os.dup(listener.fileno()) if rank == 0 else None,
        wait_for_workers=False,
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    result = function(rank, world, *args)
    # Rank 0 holds the store: it leaves last.
    store.add("test/done", 1)
    if rank == 0:
        _wait_until(lambda: store.add("test/done", 0) == world, patience_s)
    dist.destroy_process_group()
    return result


def _wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.002)


def _child(rank: int, body: Callable[[int], Any], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    outcome = Outcome()
    try:
        outcome.result = body(rank)
    except BaseException as error:
        outcome.text = traceback.format_exc()
        outcome.error = error
    try:
        payload = pickle.dumps(outcome)
    except Exception:  # an error type that cannot be pickled: its text is enough
        outcome.error = RuntimeError(str(outcome.error))
        payload = pickle.dumps(outcome)
    pipe.send_bytes(payload)
    sys.stdout.flush()
    sys.stderr.flush()
    # Like the end of a script, without running pytest's own exit handlers.
    runtime = sys.modules.get("mccl_core._runtime")
    if runtime is not None:
        runtime._stop()
    os._exit(0)


def _collect(world: int, body: Callable[[int], Any], timeout_s: float) -> list[Outcome]:
    context = multiprocessing.get_context("fork")
    processes, pipes = [], []
    for rank in range(world):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(rank, body, sender), daemon=True)
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    outcomes = [Outcome(text="did not end in time") for _ in range(world)]
    pending = dict(zip(pipes, range(world), strict=True))
    until = time.monotonic() + timeout_s
    try:
        while pending and time.monotonic() < until:
            for pipe in wait(list(pending), timeout=max(0.0, until - time.monotonic())):
                rank = pending.pop(pipe)
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    processes[rank].join(10)
                    code = processes[rank].exitcode
                    outcomes[rank] = Outcome(text=f"died with exit code {code}", exit_code=code)
        for process in processes:
            process.join(max(0.0, min(15.0, until - time.monotonic())))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    return outcomes
