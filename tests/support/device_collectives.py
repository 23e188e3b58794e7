"""Each collective on tensors of a device, with the values that a kernel has to find afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

WORLD = 3
SHAPE = (6, 1000)


class Kernels(Protocol):
    """A rank's tensors: written by kernels of a device that may run late, and read by kernels."""

    rank: int

    def filled(self, value: float, *shape: int, strided: bool = False) -> torch.Tensor:
        """A tensor, `SHAPE` by default, that a kernel fills; `strided`: one that is not contiguous."""

    def seen(self, tensors: list[torch.Tensor]) -> list[float]:
        """What kernels that are encoded now find: each tensor's one value, NaN where it has several."""


Started = tuple[list[dist.Work], list[torch.Tensor], list[float]]
"""A collective's work, its results and the values that they will have."""
Collective = Callable[[Kernels, bool], Started]


def all_reduce(on: Kernels, strided: bool) -> Started:
    data = on.filled(on.rank + 1, strided=strided)
    return [dist.all_reduce(data, async_op=True)], [data], [6.0]


def broadcast(on: Kernels, strided: bool) -> Started:
    data = on.filled(on.rank + 1, strided=strided)
    return [dist.broadcast(data, src=1, async_op=True)], [data], [2.0]


def reduce(on: Kernels, strided: bool) -> Started:
    data = on.filled(on.rank + 1, strided=strided)
    return [dist.reduce(data, dst=2, async_op=True)], [data], [6.0 if on.rank == 2 else on.rank + 1.0]


def all_gather(on: Kernels, strided: bool) -> Started:
    out = [on.filled(-2, strided=strided) for _ in range(WORLD)]
    return [dist.all_gather(out, on.filled(on.rank + 1), async_op=True)], out, [1.0, 2.0, 3.0]


def all_gather_into_tensor(on: Kernels, strided: bool) -> Started:
    out = on.filled(-2, WORLD * SHAPE[0], SHAPE[1], strided=strided)
    work = dist.all_gather_into_tensor(out, on.filled(on.rank + 1), async_op=True)
    return [work], list(out.chunk(WORLD)), [1.0, 2.0, 3.0]


def reduce_scatter(on: Kernels, strided: bool) -> Started:
    out = on.filled(-2, strided=strided)
    ins = [on.filled(on.rank + 10 * r) for r in range(WORLD)]
    return [dist.reduce_scatter(out, ins, async_op=True)], [out], [3.0 + 30 * on.rank]


def reduce_scatter_tensor(on: Kernels, strided: bool) -> Started:
    out = on.filled(-2, strided=strided)
    work = dist.reduce_scatter_tensor(out, on.filled(on.rank, WORLD * SHAPE[0], SHAPE[1]), async_op=True)
    return [work], [out], [3.0]


def gather(on: Kernels, strided: bool) -> Started:
    out = [on.filled(-2, strided=strided) for _ in range(WORLD)] if on.rank == 0 else None
    work = dist.gather(on.filled(on.rank + 1), out, dst=0, async_op=True)
    return [work], out or [], [1.0, 2.0, 3.0] if out else []


def scatter(on: Kernels, strided: bool) -> Started:
    out = on.filled(-2, strided=strided)
    ins = [on.filled(10 * r) for r in range(WORLD)] if on.rank == 0 else None
    return [dist.scatter(out, ins, src=0, async_op=True)], [out], [10.0 * on.rank]


def all_to_all(on: Kernels, strided: bool) -> Started:
    out = [on.filled(-2, strided=strided) for _ in range(WORLD)]
    ins = [on.filled(10 * on.rank + r) for r in range(WORLD)]
    return [dist.all_to_all(out, ins, async_op=True)], out, [10.0 * r + on.rank for r in range(WORLD)]


def all_to_all_single(on: Kernels, strided: bool) -> Started:
    out = on.filled(-2, strided=strided)
    return [dist.all_to_all_single(out, on.filled(on.rank + 1), async_op=True)], list(out.chunk(WORLD)), [1.0, 2.0, 3.0]


def send_and_receive(on: Kernels, strided: bool) -> Started:
    right, left = (on.rank + 1) % WORLD, (on.rank - 1) % WORLD
    sent, out = on.filled(on.rank + 1), on.filled(-2, strided=strided)
    return [dist.isend(sent, right), dist.irecv(out, left)], [sent, out], [on.rank + 1.0, left + 1.0]


COLLECTIVES: list[Collective] = [
    all_reduce,
    broadcast,
    reduce,
    all_gather,
    all_gather_into_tensor,
    reduce_scatter,
    reduce_scatter_tensor,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
    send_and_receive,
]


def check_each(on: Kernels, *, strided: bool = False) -> None:
    """Runs all collectives on each of `WORLD` ranks; a kernel that is encoded behind wait() looks at the results."""
    for collective in COLLECTIVES:
        works, results, wanted = collective(on, strided)
        for work in works:
            work.wait()
        assert on.seen(results) == wanted, collective.__name__
