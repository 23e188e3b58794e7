"""What every rank of a group must get when one of them, the culprit, has a fault."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_processes import Outcome, RankProcesses
from support.ranks import all_are_here

import mccl_core
from netns.network import Network
from netns.waiting import wait_until_sent

CULPRIT = 2
IN_FLIGHT = 3
FLOWING_NBYTES = 40_000  # so much has left a host: ops are under way
LONG_BEAT = {"MCCL_HEARTBEAT_INTERVAL_MS": "60000"}  # silence is not what ends these
SOON_S = 10.0  # for what takes a second at most, on a busy machine; far from a minute
REPORT_S = 90.0


def beat(interval_s: float) -> dict[str, str]:
    return {"MCCL_HEARTBEAT_INTERVAL_MS": str(round(interval_s * 1000))}


@dataclass
class Seen:
    """The error that a rank got, and when."""

    text: str
    fields: mccl_core.ErrorReport
    at: float
    began_at: float


def seen(call: Callable[[], object]) -> Seen:
    """Runs a call that must end with a DistBackendError."""
    began_at = time.monotonic()
    with pytest.raises(dist.DistBackendError) as info:
        call()
    at = time.monotonic()
    fields = mccl_core.last_error()
    assert fields is not None
    return Seen(str(info.value), fields, at, began_at)


def reduce_until_it_fails() -> None:
    """All-reduces, several at once. All that are in flight end with the error that ends the first, and leave NaN.

    Raises:
        DistBackendError: of the first that failed.
    """
    world = dist.get_world_size()
    in_flight: deque[tuple[Any, torch.Tensor]] = deque()

    def start() -> None:
        tensor = torch.ones(1000)
        in_flight.append((dist.all_reduce(tensor, async_op=True), tensor))

    def finish() -> None:
        work, tensor = in_flight.popleft()
        try:
            work.wait()
        except dist.DistBackendError:
            assert tensor.isnan().all(), tensor
            raise
        assert torch.equal(tensor, torch.full_like(tensor, world)), tensor

    try:
        while True:
            start()
            if len(in_flight) > IN_FLIGHT:
                finish()
    except dist.DistBackendError as error:
        while in_flight:
            try:
                finish()
            except dist.DistBackendError as other:
                assert str(other) == str(error)
        raise


def go_on_until_it_fails(rank: int, world: int) -> Seen:
    all_are_here(rank, world)
    return seen(reduce_until_it_fails)


def reduce_in_a_new_group(ranks: list[int]) -> None:
    """In the process that has just seen an error: makes a group of `ranks` at once, and uses it."""
    began_at = time.monotonic()
    group = dist.new_group(ranks, use_local_synchronization=True)
    tensor = torch.full((300_000,), float(dist.get_rank()))
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.full_like(tensor, sum(ranks))), tensor
    assert time.monotonic() - began_at < SOON_S


def all_but_culprit(world: int) -> list[int]:
    return [rank for rank in range(world) if rank != CULPRIT]


def go_on_in_a_new_group(rank: int, world: int) -> Seen:
    """What a rank that is not the culprit does when the culprit is gone."""
    error = go_on_until_it_fails(rank, world)
    if rank != CULPRIT:
        reduce_in_a_new_group(all_but_culprit(world))
    return error


def check(outcome: Outcome, kind: str, *, names: int | None = CULPRIT) -> Seen:
    """The rank lived to see an error of this kind that names the culprit, its host, the op, its ticket, a remedy.

    With `names` None it may name another rank.
    """
    assert outcome.text == "", outcome.text
    error: Seen = outcome.result
    assert error.fields.kind == kind, error.text
    assert error.fields.op and error.fields.ticket > 0, error
    assert f"{error.fields.op} #{error.fields.ticket}: {kind}" in error.text
    assert error.fields.advice and error.text.endswith(error.fields.advice)
    assert f"rank {error.fields.peer} on h{error.fields.peer}" in error.text
    if names is not None:
        assert error.fields.peer == names, error.text
    return error


def others(outcomes: list[Outcome]) -> list[Outcome]:
    return [outcomes[rank] for rank in all_but_culprit(len(outcomes))]


def wait_until_busy(network: Network) -> None:
    host = network.hosts[CULPRIT]
    wait_until_sent(host, FLOWING_NBYTES, host.sent_nbytes())


def wait_until_others_have_reported(ranks: RankProcesses) -> None:
    """The stopped rank cannot: it is let on only when all others have seen the silence."""
    until = time.monotonic() + REPORT_S
    pipes = [pipe for rank, pipe in enumerate(ranks._pipes) if rank != CULPRIT]
    assert all(pipe.poll(max(0.0, until - time.monotonic())) for pipe in pipes)
