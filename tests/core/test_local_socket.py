"""Processes of one machine talk over Unix sockets, or over TCP where MCCL_TRANSPORT says so; results are the same."""

from __future__ import annotations

import os
import socket
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankFailed, run_ranks

from mccl_core import _local_socket


def connected_families() -> Counter[str]:
    """Of this process's connections to other ranks, by the listener's name or port."""
    families: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:["):
                continue
            sock = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # the descriptor of this listing
            continue
        with sock:
            try:
                ends = (sock.getsockname(), sock.getpeername())
            except OSError:  # a listener
                continue
            if sock.family == socket.AF_UNIX and any(b"mccl-" in bytes(end) for end in ends if isinstance(end, bytes)):
                families["unix"] += 1
            if sock.family == socket.AF_INET and any(29600 <= port < 29700 for _, port in ends):
                families["tcp"] += 1
    return families


def all_kinds(rank: int, world: int) -> tuple[Counter[str], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    results = []
    for count in (1, 1_000, 300_007, 3_000_001):
        tensor = torch.rand(count, generator=generator)
        dist.all_reduce(tensor)
        gathered = [torch.empty_like(tensor) for _ in range(world)]
        dist.all_gather(gathered, tensor * (rank + 1))
        results += [tensor, gathered[0], gathered[-1]]
    return connected_families(), results


@pytest.mark.parametrize("world", [2, 5])
def test_transports_give_the_same_bits(world: int) -> None:
    local = run_ranks(world, all_kinds, MCCL_TRANSPORT="auto")
    routed = run_ranks(world, all_kinds, MCCL_TRANSPORT="tcp")
    for (families, results), (tcp_families, tcp_results) in zip(local, routed, strict=True):
        assert set(families) == {"unix"}
        assert set(tcp_families) == {"tcp"}
        for ours, theirs in zip(results, tcp_results, strict=True):
            assert torch.equal(ours, theirs)


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(RankFailed, match=r"transport.*'pigeon'.*MCCL_TRANSPORT"):
        run_ranks(1, all_kinds, MCCL_TRANSPORT="pigeon")


def test_nobody_is_found_under_the_name_of_a_process_elsewhere() -> None:
    assert _local_socket.connect(os.urandom(16), 1) is None


def test_the_name_is_free_again_once_its_owner_is_gone() -> None:
    process = os.urandom(16)
    first = _local_socket.bind(process, 1)
    with pytest.raises(OSError, match="in use"):
        _local_socket.bind(process, 1)
    first.close()
    _local_socket.remove(process)
    second = _local_socket.bind(process, 1)
    try:
        with _local_socket.connect(process, 1) as dialled:  # type: ignore[union-attr]
            assert dialled.family == socket.AF_UNIX
    finally:
        second.close()
        _local_socket.remove(process)
