"""Random programs on two overlapping groups: whatever order each rank posts them in, they end, and are exact.

A program is a few collectives on each group and messages between any two members, all asynchronous. Ranks agree on the
order of the collectives within a group, and of the messages of one sender, receiver and tag; everything else each rank
posts in an order of its own. To run more of them, here numbers 5000 to 9999 on six ranks:

    PYTHONPATH=tests:tests/core python -c "from support.ranks import run_ranks; import test_random_programs as t; \
run_ranks(6, t.run_programs, 5000, 5000, timeout_s=3600)"
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

PROGRAMS = 600
QUICK_PROGRAMS = 60
MOST_OPS = 18  # of one program
MOST_GROUPS = 10  # beside the one of all ranks
MOST_ELEMENTS = 20_000
MANY_ELEMENTS = 300_000  # rarely: more than one segment
DTYPES = [torch.float32, torch.int64, torch.uint8]
REDUCE_OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
}
# 16 bits: the sum of 256 of them is exact in float32; in uint8 it wraps.
NUMBERS = torch.randint(0, 65536, (1_000_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)


@dataclass(frozen=True)
class Op:
    """One collective, or one message from `source` to `root`. Ranks are positions in `members`."""

    salt: int  # of its data
    kind: str
    members: tuple[int, ...]
    count: int
    dtype: torch.dtype
    reduce_op: str
    root: int
    source: int
    tag: int


@dataclass(frozen=True)
class Started:
    work: Any
    results: list[torch.Tensor]
    expected: Callable[[], list[torch.Tensor]]


@dataclass(frozen=True)
class Call:
    """An op as one of its members sees it."""

    op: Op
    me: int
    group: dist.ProcessGroup

    @property
    def everyone(self) -> range:
        return range(len(self.op.members))

    def data(self, position: int, block: int = 0, count: int | None = None) -> torch.Tensor:
        """What a member contributes for `block`; each member can compute it. A new tensor of op.count elements."""
        count = self.op.count if count is None else count
        at = random.Random(f"{self.op.salt}/{position}/{block}").randrange(len(NUMBERS) - count)
        return NUMBERS[at : at + count].to(self.op.dtype)

    def reduced(self, block: int = 0) -> torch.Tensor:
        return functools.reduce(REDUCE_OPS[self.op.reduce_op], [self.data(p, block) for p in self.everyone])

    def empty(self, count: int | None = None) -> torch.Tensor:
        return torch.full((self.op.count if count is None else count,), 77, dtype=self.op.dtype)

    @property
    def keywords(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": True}

    @property
    def root(self) -> int:
        """As torch wants it: among all ranks."""
        return self.op.members[self.op.root]

    @property
    def reduction(self) -> Any:
        return getattr(dist.ReduceOp, self.op.reduce_op)


def all_reduce(call: Call) -> Started:
    tensor = call.data(call.me)
    work = dist.all_reduce(tensor, op=call.reduction, **call.keywords)
    return Started(work, [tensor], lambda: [call.reduced()])


def reduce(call: Call) -> Started:
    tensor = call.data(call.me)
    work = dist.reduce(tensor, call.root, op=call.reduction, **call.keywords)
    return Started(work, [tensor], lambda: [call.reduced() if call.me == call.op.root else call.data(call.me)])


def broadcast(call: Call) -> Started:
    tensor = call.data(call.me)
    work = dist.broadcast(tensor, call.root, **call.keywords)
    return Started(work, [tensor], lambda: [call.data(call.op.root)])


def all_gather(call: Call) -> Started:
    outputs, own = [call.empty() for _ in call.everyone], call.data(call.me)
    work = dist.all_gather(outputs, own, **call.keywords)
    return Started(work, [*outputs, own], lambda: [call.data(p) for p in (*call.everyone, call.me)])


def reduce_scatter(call: Call) -> Started:
    output, inputs = call.empty(), [call.data(call.me, p) for p in call.everyone]
    work = dist.reduce_scatter(output, inputs, op=call.reduction, **call.keywords)
    expected = lambda: [call.reduced(call.me), *(call.data(call.me, p) for p in call.everyone)]  # noqa: E731
    return Started(work, [output, *inputs], expected)


def gather(call: Call) -> Started:
    outputs = [call.empty() for _ in call.everyone] if call.me == call.op.root else []
    work = dist.gather(call.data(call.me), outputs or None, dst=call.root, **call.keywords)
    return Started(work, outputs, lambda: [call.data(p) for p in call.everyone[: len(outputs)]])


def scatter(call: Call) -> Started:
    output = call.empty()
    inputs = [call.data(call.op.root, p) for p in call.everyone] if call.me == call.op.root else None
    work = dist.scatter(output, inputs, src=call.root, **call.keywords)
    return Started(work, [output], lambda: [call.data(call.op.root, call.me)])


def all_to_all(call: Call) -> Started:
    """Each pair has a size of its own, which may be nothing."""

    def block(source: int, destination: int) -> torch.Tensor:
        size = random.Random(f"{call.op.salt}/{source}>{destination}").choice([0, 1, call.op.count // 2, call.op.count])
        return call.data(source, destination, size)

    inputs = [block(call.me, p) for p in call.everyone]
    expected = [block(p, call.me) for p in call.everyone]
    sizes, sent_sizes = [len(t) for t in expected], [len(t) for t in inputs]
    output = call.empty(sum(sizes))
    work = dist.all_to_all_single(output, torch.cat(inputs), sizes, sent_sizes, **call.keywords)
    return Started(work, [output], lambda: [torch.cat(expected)])


def barrier(call: Call) -> Started:
    return Started(dist.barrier(**call.keywords), [], list)


def message(call: Call) -> Started:
    """Its sender and its receiver call this, nobody else."""
    if call.me == call.op.source:
        tensor = call.data(call.me)
        work = dist.isend(tensor, call.root, group=call.group, tag=call.op.tag)
    else:
        tensor = call.empty()
        work = dist.irecv(tensor, call.op.members[call.op.source], group=call.group, tag=call.op.tag)
    return Started(work, [tensor], lambda: [call.data(call.op.source)])


COLLECTIVES = {
    f.__name__: f
    for f in (all_reduce, reduce, broadcast, all_gather, reduce_scatter, gather, scatter, all_to_all, barrier)
}
KINDS = {**COLLECTIVES, "message": message}


def random_program(seed: int, groups: list[tuple[int, ...]]) -> list[Op]:
    """The same on all ranks. Uses the group of all ranks, which is the first, and one of the others."""
    draw = random.Random(seed)
    pair = [groups[0], draw.choice(groups[1:])]
    ops = []
    for index in range(draw.randint(6, MOST_OPS)):
        members = draw.choice(pair)
        root, source = draw.sample(range(len(members)), 2)
        most = MANY_ELEMENTS if draw.random() < 0.03 else MOST_ELEMENTS
        ops.append(
            Op(
                salt=1000 * seed + index,
                kind="message" if draw.random() < 0.4 else draw.choice(list(COLLECTIVES)),
                members=members,
                count=0 if draw.random() < 0.03 else int(most ** draw.random()),
                dtype=draw.choice(DTYPES),
                reduce_op=draw.choice(list(REDUCE_OPS)),
                root=root,
                source=source,
                tag=draw.randint(0, 2),
            )
        )
    return ops


def in_own_order(ops: list[Op], rank: int, own: random.Random) -> Iterator[Op]:
    """This rank's part of the program, merged at random; some queues tend to come early and some late."""
    queues: dict[Any, deque[Op]] = {}
    for op in ops:
        if rank not in op.members:
            continue
        ends = (op.members[op.source], op.members[op.root])
        if op.kind == "message" and rank not in ends:
            continue
        key = (op.members, *ends, op.tag) if op.kind == "message" else op.members
        queues.setdefault(key, deque()).append(op)
    weights = {key: own.random() ** 4 + 1e-6 for key in queues}
    while queues:
        key = own.choices(list(queues), [weights[k] for k in queues])[0]
        yield queues[key].popleft()
        if not queues[key]:
            del queues[key]


def run_program(seed: int, rank: int, groups: dict[tuple[int, ...], Any]) -> None:
    own = random.Random(f"{seed}/{rank}")
    started = []
    for op in in_own_order(random_program(seed, list(groups)), rank, own):
        if own.random() < 0.02:
            time.sleep(own.uniform(0, 0.005))
        started.append((op, KINDS[op.kind](Call(op, op.members.index(rank), groups[op.members]))))
    own.shuffle(started)
    for _, begun in started:
        begun.work.wait()
    for op, begun in started:
        for result, expected in zip(begun.results, begun.expected(), strict=True):
            assert torch.equal(result, expected), f"wrong result of {op}"


def run_programs(rank: int, world: int, first_seed: int, count: int) -> None:
    """Runs programs number `first_seed` and the `count - 1` after it. Called on each rank of a world of 3 or more."""
    everyone = tuple(range(world))
    smaller = [members for size in range(2, world) for members in itertools.combinations(everyone, size)]
    chosen = random.Random(world).sample(smaller, min(len(smaller), MOST_GROUPS))
    limit = timedelta(seconds=60)
    groups = {members: dist.new_group(list(members), timeout=limit) for members in [everyone, *chosen]}
    for seed in range(first_seed, first_seed + count):
        try:
            run_program(seed, rank, groups)
        except BaseException as error:
            error.add_note(f"in program {seed} of world {world} on rank {rank}")
            raise


LITTLE_CREDIT: dict[str, Any] = {"MCCL_CREDIT_NBYTES": "65536", "MCCL_EAGER_GRANT_NBYTES": "1000000000"}


@pytest.mark.parametrize("settings", [{}, LITTLE_CREDIT], ids=["defaults", "little_credit"])
def test_random_programs_end_and_are_exact(settings: dict[str, Any]) -> None:
    run_ranks(4, run_programs, 0, QUICK_PROGRAMS, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, LITTLE_CREDIT], ids=["defaults", "little_credit"])
@pytest.mark.parametrize("world", [4, 6])
def test_many_random_programs_end_and_are_exact(world: int, settings: dict[str, Any]) -> None:
    run_ranks(world, run_programs, 10_000, PROGRAMS, timeout_s=250, **settings)
