"""Many ranks on one machine: how many connections each has, and that the first all-reduce is right.

No limit is set on the time, which depends on the machine; it is printed (`pytest -s`). For 64 ranks:

    PYTHONPATH=tests:tests/core python -c "import test_scale; test_scale.run_scale(64)"
"""

from __future__ import annotations

import math
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.rank_processes import RankProcesses
from support.ranks import listening_socket, results_of

from mccl_core import _runtime

WORLD = 24
ELEMENTS = 100_003
ESTABLISHED = "01"  # in /proc/net/tcp


@dataclass(frozen=True)
class Joined:
    """Times are of time.monotonic(), one clock for all processes of a machine."""

    started_s: float
    finished_s: float
    connection_count: int


def port_of(address: str) -> int:
    """Of an address as /proc/net/tcp writes it."""
    return int(address.rpartition(":")[2], 16)


def connection_count(listening_ports: set[int]) -> int:
    """Established TCP sockets of this process that have a rank's listening port at either end."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # the descriptor of this listing
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    count = 0
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net", table)
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            _, local, remote, state, *rest = line.split()
            if state == ESTABLISHED and rest[5] in inodes:
                count += bool({port_of(local), port_of(remote)} & listening_ports)
    return count


def join(rank: int, world: int, listener: socket.socket) -> Joined:
    torch.set_num_threads(1)
    os.environ["MCCL_TRANSPORT"] = "tcp"  # /proc names the ports of both ends
    limit = timedelta(seconds=120)
    store = dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        world,
        is_master=rank == 0,
        timeout=limit,
        master_listen_fd=os.dup(listener.fileno()) if rank == 0 else None,
        wait_for_workers=False,
    )
    started_s = time.monotonic()
    dist.init_process_group("mccl", store=store, rank=rank, world_size=world, timeout=limit)
    numbers = (torch.arange(ELEMENTS) % 251).float()
    tensor = numbers * (rank + 1)
    dist.all_reduce(tensor)
    finished_s = time.monotonic()
    assert torch.equal(tensor, numbers * (world * (world + 1) // 2))
    runtime = _runtime.current_runtime()
    assert runtime is not None
    store.set(f"port/{rank}", str(runtime.port))
    ports = {int(store.get(f"port/{other}")) for other in range(world)}
    count = connection_count(ports)
    dist.barrier()  # all have counted, and nobody needs the store any more
    dist.destroy_process_group()
    return Joined(started_s, finished_s, count)


def run_scale(world: int) -> list[Joined]:
    """Starts `world` ranks here and now; prints, checks and returns what they saw.

    Raises:
        RankFailed: a rank raised, died or hung.
        AssertionError: a rank has more connections than 2 log2(world) + 4.
    """
    # Held until all have reported: nobody sees another one leave.
    with listening_socket() as listener, RankProcesses(world, lambda r: join(r, world, listener), hold=True) as ranks:
        joined = results_of(ranks.outcomes(250))
        ranks.let_go(30)
    took_s = max(j.finished_s for j in joined) - max(j.started_s for j in joined)
    counts = [j.connection_count for j in joined]
    print(f"{world} ranks: {took_s:.2f} s to join and all-reduce; {min(counts)} to {max(counts)} connections a rank")
    assert max(counts) <= 2 * math.log2(world) + 4
    assert min(counts) >= 2, "each rank has at least its ring neighbours: the count is wrong"
    return joined


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="counts sockets in /proc, which is Linux's")
def test_24_ranks_have_few_connections_each() -> None:
    run_scale(WORLD)
