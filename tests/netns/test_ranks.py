"""One rank a host: results and failures are collected, and nothing goes on running."""

from __future__ import annotations

import os
import signal
import socket

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankFailed, results_of

from netns.network import Network
from netns.ranks import ranks_on
from netns.tools import run_tool


def sum_of_ranks(rank: int, world: int) -> tuple[str, str, float]:
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    return socket.gethostname(), os.environ["RANK"], tensor.item()


@pytest.mark.parametrize("backend", ["mccl", "gloo"])
def test_each_rank_runs_on_its_host_and_returns_its_result(backend: str) -> None:
    with Network(3) as network, ranks_on(network.hosts, sum_of_ranks, backend=backend) as ranks:
        assert results_of(ranks.outcomes(60)) == [(f"h{rank}", str(rank), 3.0) for rank in range(3)]
        ranks.let_go(10)


def one_fails(rank: int, world: int) -> int:
    dist.barrier()
    if rank == 1:
        raise ZeroDivisionError("on purpose")
    return rank


def test_a_failure_is_told_with_its_rank_and_spares_the_others() -> None:
    with Network(2) as network, ranks_on(network.hosts, one_fails, backend="gloo") as ranks:
        outcomes = ranks.outcomes(60)
        with pytest.raises(RankFailed, match=r"rank 1[\s\S]*on purpose"):
            results_of(outcomes)
        assert outcomes[0].result == 0 and isinstance(outcomes[1].error, ZeroDivisionError)


def one_never_ends(rank: int, world: int) -> None:
    dist.barrier()
    if rank == 1:
        signal.pause()


def test_a_rank_that_hangs_is_reported_and_killed() -> None:
    with Network(2) as network:
        with ranks_on(network.hosts, one_never_ends, backend="gloo") as ranks:
            outcomes = ranks.outcomes(3)
        assert outcomes[1].text == "did not end in time"
        assert not run_tool("ip", "netns", "pids", network.hosts[1].namespace)
