"""A dialler that a busy listener has dropped comes again; one that will never be let in does not."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

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
