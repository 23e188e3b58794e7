"""A dialler that a busy listener has dropped comes again; one that will never be let in does not."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import all_are_here, run_ranks

from mccl_core import _handshake, _runtime
from mccl_core._handshake import HandshakeBroken, HandshakeError


class Droppers:
    """In place of the runtime's module `_handshake`: the first `count` attempts are cut off."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.attempts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(_handshake, name)

    def dial(self, sock: socket.socket, **arguments: Any) -> Any:
        self.attempts += 1
        if self.left > 0:
            self.left -= 1
            raise HandshakeBroken("it closed the connection during the handshake")
        return _handshake.dial(sock, **arguments)


def dropped(rank: int, world: int) -> int:
    droppers = Droppers(3)
    _runtime._handshake = droppers
    group = dist.new_group(backend="mccl")
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=group)
    assert tensor[0].item() == world
    return droppers.attempts


def test_a_dropped_dialler_comes_again() -> None:
    attempts = run_ranks(3, dropped, backend="gloo")
    assert attempts[0] >= 4  # rank 0 dials the others


def dropped_for_ever(rank: int, world: int) -> tuple[str, float]:
    _runtime._handshake = Droppers(10**9)
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as info:
        dist.new_group(backend="mccl")
    return str(info.value), time.monotonic() - start


def test_it_gives_up_when_the_time_is_over() -> None:
    outcomes = run_ranks(2, dropped_for_ever, backend="gloo", MCCL_CONNECT_TIMEOUT_MS="1000")
    text, took = outcomes[0]
    assert "cannot connect to rank 1" in text and "closed the connection" in text
    assert 0.4 < took < 20
    assert "did not connect" in outcomes[1][0]


def refused(rank: int, world: int) -> tuple[str, int]:
    class Refuser(Droppers):
        def dial(self, sock: socket.socket, **arguments: Any) -> Any:
            self.attempts += 1
            raise HandshakeError("authentication failed: it has another job secret")

    refuser = Refuser(0)
    _runtime._handshake = refuser
    os.environ["MCCL_CONNECT_TIMEOUT_MS"] = "2000"
    with pytest.raises(dist.DistBackendError) as info:
        dist.new_group(backend="mccl")
    return str(info.value), refuser.attempts


def test_a_refusal_is_not_tried_again() -> None:
    text, attempts = run_ranks(2, refused, backend="gloo")[0]
    assert "refused the connection: authentication failed" in text and "MCCL_SECRET" in text
    assert attempts == 1


class SlowToNotice:
    """In place of the runtime's engine: its listener takes a connection that has ended for alive, `count` times."""

    def __init__(self, engine: Any, count: int) -> None:
        self._engine = engine
        self.left = count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def connected(self, process: bytes, lane: int) -> bool:
        if threading.current_thread() is not threading.main_thread() and self.left > 0:
            self.left -= 1
            return True
        return bool(self._engine.connected(process, lane))


def shut_local_sockets() -> None:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=os.dup(int(entry.name))) as sock:
                if sock.family == socket.AF_UNIX:
                    sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # no socket, or not a connected one
            continue


def connected_again(rank: int, world: int) -> int:
    dist.barrier()
    all_are_here(rank, world)  # through the barrier, too
    runtime = _runtime.current_runtime()
    assert runtime is not None
    slow = SlowToNotice(runtime.engine, 6)  # more often than an op's way to the wire tries in all
    if rank == 0:
        shut_local_sockets()
    else:
        runtime.engine = slow
    with pytest.raises(dist.DistBackendError):
        while True:
            dist.all_reduce(torch.ones(1))
    group = dist.new_group()
    tensor = torch.ones(10)
    dist.all_reduce(tensor, group=group)
    assert tensor[0].item() == world
    return slow.left


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds the sockets in /proc")
def test_a_peer_that_has_not_noticed_the_end_of_a_connection_is_dialled_again() -> None:
    assert run_ranks(2, connected_again)[1] < 6  # it was told at least once that there is a connection
