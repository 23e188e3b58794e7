"""What the ranks of a round do: asynchronous collectives of random kinds and sizes, each result compared bit by bit."""

from __future__ import annotations

import contextlib
import math
import mmap
import random
import struct
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import mccl_core

SIZES = (1, 1_000, 20_000, 300_000)  # elements; the last is more than one segment on eight ranks, too
OPS_PER_STEP = 4
NUMBERS = torch.randint(-500, 500, (400_000,), generator=torch.Generator().manual_seed(1)).float()


class Board:
    """A page that the campaign and all ranks of a round share: how far each rank is, and when to stop."""

    def __init__(self, world: int) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._world = world

    def close(self) -> None:
        self._page.close()

    def step(self, rank: int) -> None:
        """By a rank: one more step is done."""
        count = self.steps(rank) + 1
        self._page[8 * (rank + 1) : 8 * (rank + 2)] = count.to_bytes(8, "little")

    def steps(self, rank: int) -> int:
        return int.from_bytes(self._page[8 * (rank + 1) : 8 * (rank + 2)], "little")

    def least_steps(self) -> int:
        return min(map(self.steps, range(self._world)))

    def act(self) -> None:
        """By a victim: now it does what it does wrong."""
        self._page[-8:] = struct.pack("d", time.monotonic())

    @property
    def acted_at(self) -> float:
        """When, of time.monotonic(); 0 where nobody has."""
        at: float = struct.unpack("d", self._page[-8:])[0]
        return at

    def stop(self) -> None:
        self._page[0] = 1

    @property
    def stopped(self) -> bool:
        return self._page[0] == 1


@dataclass
class Account:
    """What a rank reports: how it ended and how much of it was checked."""

    op_count: int = 0
    nbytes: int = 0
    error: str = ""  # the DistBackendError's text, empty where there was none
    error_at: float = math.inf  # of time.monotonic(), one clock for all processes of a machine
    peer: int = -1  # whom mccl_core.last_error() blames
    stale: int = 0  # results of failed ops that hold neither NaN nor the right sum
    survivors: list[int] = field(default_factory=list)  # ranks of the group after a shrink


def contribution(rank: int, size: int, salt: int) -> torch.Tensor:
    """Whole numbers, whose float32 sum is exact in any order."""
    offset = (salt * 7919 + rank * 104_729) % (len(NUMBERS) - size)
    return NUMBERS[offset : offset + size].clone()


class Sabotage:
    """What the rank itself does wrong; the campaign sets it before the fork. Here: nothing."""

    def before_step(self, rank: int, step: int, board: Board) -> None:
        """Called before each step; may raise, end the process, or call something that the others do not."""

    shrinks = False  # whether survivors go on in a smaller group


def train(rank: int, world: int, seed: int, board: Board, sabotage: Sabotage) -> Account:
    """Steps until the campaign says stop, or until the group fails. Raises where a result is wrong."""
    warnings.simplefilter(
        "ignore", FutureWarning
    )  # these releases rename collectives; the old names are in all of them
    account = Account()
    try:
        _steps(rank, world, seed, board, sabotage, account)
    except dist.DistBackendError as error:
        account.error, account.error_at = str(error), time.monotonic()
        report = mccl_core.last_error()
        account.peer = report.peer if report is not None else -1
        if sabotage.shrinks:
            account.survivors = _go_on(rank, seed, account)
    return account


def _steps(rank: int, world: int, seed: int, board: Board, sabotage: Sabotage, account: Account) -> None:
    shared, own = random.Random(seed), random.Random(seed * 1000 + rank)
    step = 0
    while True:
        sabotage.before_step(rank, step, board)
        # All stop at the same step: what one rank has seen on the board decides for all.
        flag = torch.tensor([float(board.stopped)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item() == 1:
            return
        ops = [_start(rank, world, shared, salt=step * OPS_PER_STEP + index) for index in range(OPS_PER_STEP)]
        own.shuffle(ops)
        try:
            for work, tensor, expected in ops:
                work.wait()
                if not torch.equal(tensor, expected):
                    raise AssertionError(f"rank {rank}, step {step}: wrong result in {tensor.numel()} elements")
                account.op_count += 1
                account.nbytes += tensor.nbytes
        except dist.DistBackendError:
            account.stale += sum(_is_stale(work, tensor, expected) for work, tensor, expected in ops)
            raise
        board.step(rank)
        step += 1


def _start(rank: int, world: int, shared: random.Random, salt: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Starts one collective; returns it, its result and what that must be."""
    kind = shared.choice(["all_reduce", "all_reduce", "all_reduce", "broadcast", "all_gather", "reduce_scatter"])
    size = shared.choice(SIZES)
    if kind == "all_reduce":
        tensor = contribution(rank, size, salt)
        expected = torch.stack([contribution(r, size, salt) for r in range(world)]).sum(0)
        return dist.all_reduce(tensor, async_op=True), tensor, expected
    if kind == "broadcast":
        root = shared.randrange(world)
        tensor = contribution(rank, size, salt)
        return dist.broadcast(tensor, root, async_op=True), tensor, contribution(root, size, salt)
    size = -(-size // world)
    if kind == "all_gather":
        tensor = torch.zeros(world * size)
        expected = torch.cat([contribution(r, size, salt) for r in range(world)])
        return dist.all_gather_into_tensor(tensor, contribution(rank, size, salt), async_op=True), tensor, expected
    tensor = torch.zeros(size)
    inputs = [contribution(r, world * size, salt) for r in range(world)]
    expected = torch.stack(inputs).sum(0)[rank * size : (rank + 1) * size]
    return dist.reduce_scatter_tensor(tensor, inputs[rank], async_op=True), tensor, expected


def _is_stale(work: Any, tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a failed op has left numbers that look like a result and are none."""
    with contextlib.suppress(dist.DistBackendError):
        work.wait()
        return False  # it ended well before the group failed
    return not bool(torch.isnan(tensor).any()) and not torch.equal(tensor, expected)


def _go_on(rank: int, seed: int, account: Account) -> list[int]:
    """Goes on with those who are left, for a few steps, until all of them have seen it work."""
    group = mccl_core.shrink()
    me, count = dist.get_rank(group), dist.get_world_size(group)
    members = [torch.zeros(1) for _ in range(count)]
    dist.all_gather(members, torch.tensor([float(rank)]))
    shared = random.Random(seed + 1)
    for salt in range(8):
        work, tensor, expected = _start(me, count, shared, salt)
        work.wait()
        if not torch.equal(tensor, expected):
            raise AssertionError(f"rank {rank}: wrong result after the shrink")
        account.op_count += 1
        account.nbytes += tensor.nbytes
    return [int(member.item()) for member in members]
