"""Ranks in namespaces: one process a host, with a store in the first host and a process group on all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from support.rank_processes import RankProcesses

from netns.host import INTERFACE, Host

STORE_PORT = 29500  # always free: nobody else is in that namespace


def rank_environment(hosts: Sequence[Host], rank: int) -> dict[str, str]:
    """What a launcher would set for this rank; Gloo would otherwise look for an address under the machine's name."""
    return {
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(STORE_PORT),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }


@contextlib.contextmanager
def ranks_on(
    hosts: Sequence[Host],
    function: Callable[..., Any],
    *args: Any,
    backend: str = "mccl",
    timeout_s: float = 60.0,
    **env: str,
) -> Iterator[RankProcesses]:
    """Runs `function(rank, world, *args)` on each host, inside an initialised process group whose ops end after
    `timeout_s` seconds.

    A rank that has returned or raised stays until the caller lets go, so that the store and all sockets outlive every
    report. Leaving the context kills whatever still runs.
    """
    world = len(hosts)

    def body(rank: int) -> Any:
        hosts[rank].enter()
        os.environ.update(rank_environment(hosts, rank) | env)
        torch.set_num_threads(1)
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        return function(rank, world, *args)

    with RankProcesses(world, body, hold=True) as ranks:
        yield ranks
