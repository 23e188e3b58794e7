"""MCCL_TRANSPORT_CRC: exact as before, and a payload that is damaged on its way is an error that names its sender."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, run_ranks_to_the_end

from mccl_core import _runtime


def all_kinds(rank: int, world: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    results = []
    for count in (1, 1_000, 300_007, 2_000_001):
        tensor = torch.rand(count, generator=generator)
        dist.all_reduce(tensor)
        gathered = [torch.empty_like(tensor) for _ in range(world)]
        dist.all_gather(gathered, tensor * (rank + 1))
        results += [tensor, gathered[-1]]
    if rank == 0:
        dist.send(results[0], 1, tag=5)
    if rank == 1:
        dist.recv(results[0], 0, tag=5)
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_results_are_the_same_bits_with_and_without(world: int) -> None:
    checked = run_ranks(world, all_kinds, MCCL_TRANSPORT_CRC="1")
    plain = run_ranks(world, all_kinds, MCCL_TRANSPORT_CRC="0")
    for ours, theirs in zip(checked, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def relay(source: socket.socket, target: socket.socket, flip_at: int) -> None:
    """Passes bytes on until the end; flips a bit of the byte number `flip_at`."""
    passed = 0
    while data := source.recv(1 << 16):
        if passed <= flip_at < passed + len(data):
            damaged = bytearray(data)
            damaged[flip_at - passed] ^= 0x10
            data = bytes(damaged)
        passed += len(data)
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


class BadCable:
    """In place of the module `socket` in the runtime: what this process sends is damaged once, after the handshake."""

    def __init__(self, flip_at: int) -> None:
        self._flip_at = flip_at

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)

    def create_connection(self, address: tuple[str, int], timeout: float) -> socket.socket:
        real = socket.create_connection(address, timeout=timeout)
        real.settimeout(None)
        near, far = socket.socketpair()
        for source, target, flip_at in ((far, real, self._flip_at), (real, far, -1)):
            threading.Thread(target=relay, args=(source, target, flip_at), daemon=True).start()
        return near


def over_a_bad_cable(rank: int, world: int) -> str:
    """Rank 1's connection to rank 2 goes over it."""
    if rank == 1:
        _runtime.socket = BadCable(500_000)
    group = dist.new_group(backend="mccl")
    with pytest.raises(dist.DistBackendError) as info:
        for _ in range(10):
            dist.all_reduce(torch.ones(1_000_000), group=group)
    return str(info.value)


def test_a_damaged_payload_is_an_error_that_names_the_rank_it_came_from() -> None:
    settings = {"MCCL_TRANSPORT_CRC": "1", "MCCL_TRANSPORT": "tcp", "MCCL_HOST_NAME": "studio"}
    texts = run_ranks(3, over_a_bad_cable, backend="gloo", **settings)
    assert "rank 1 on studio sent a payload that arrived damaged" in texts[2], texts
    assert all("rank 1" in text or "rank 2" in text for text in texts)


def differently_set(rank: int, world: int) -> None:
    os.environ["MCCL_TRANSPORT_CRC"] = str(rank % 2)
    dist.new_group(backend="mccl")


def test_ranks_that_do_not_agree_are_refused_with_the_variable_s_name() -> None:
    for outcome in run_ranks_to_the_end(3, differently_set, backend="gloo", timeout_s=60):
        assert isinstance(outcome.error, dist.DistBackendError)
        assert "MCCL_TRANSPORT_CRC) is" in outcome.text and "set it alike on all ranks" in outcome.text
