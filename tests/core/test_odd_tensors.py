"""Every collective with tensors that are not plain float32: the right result, or one clear error and no harm done."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

WORLD = 3
REAL = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128, torch.complex32]
MOVED_ONLY = [torch.bool, torch.float8_e4m3fn]


def values(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(seed))
    if dtype.is_complex:
        return torch.complex(tensor.double(), tensor.double().flip(0)).to(dtype)
    return tensor.to(dtype)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Bytes: torch cannot compare all of these types.
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8) if a.numel() else torch.empty(0),
        b.contiguous().view(torch.uint8) if b.numel() else torch.empty(0),
    )


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with gaps between them."""
    if tensor.numel() == 0:
        return tensor
    holder = torch.empty(*tensor.shape, 2, dtype=tensor.dtype)
    view = holder[..., 0]
    view.copy_(tensor)
    return view


def moves(rank: int, world: int, dtype: torch.dtype, shape: tuple[int, ...], gaps: bool) -> None:
    """All collectives that move bytes, checked against what they are defined to do."""
    made = strided if gaps else (lambda tensor: tensor)
    of = [values(r, shape, dtype) for r in range(world)]
    empty = lambda: made(torch.zeros(shape, dtype=dtype))  # noqa: E731

    tensor = made(of[rank].clone())
    dist.broadcast(tensor, 1)
    assert equal(tensor, of[1])
    outputs = [empty() for _ in range(world)]
    dist.all_gather(outputs, made(of[rank]))
    assert all(equal(o, x) for o, x in zip(outputs, of, strict=True))
    whole = made(torch.zeros(world * shape[0], *shape[1:], dtype=dtype))
    dist.all_gather_single(whole, made(of[rank]))
    assert equal(whole, torch.cat(of))
    outputs = [empty() for _ in range(world)]
    dist.gather(made(of[rank]), outputs if rank == 2 else None, dst=2)
    assert rank != 2 or all(equal(o, x) for o, x in zip(outputs, of, strict=True))
    tensor = empty()
    dist.scatter(tensor, [made(x) for x in of] if rank == 0 else None, src=0)
    assert equal(tensor, of[rank])
    outputs = [empty() for _ in range(world)]
    dist.all_to_all(outputs, [made(values(10 * rank + r, shape, dtype)) for r in range(world)])
    assert all(equal(o, values(10 * r + rank, shape, dtype)) for r, o in enumerate(outputs))
    dist.all_to_all_single(whole, made(torch.cat([values(10 * rank + r, shape, dtype) for r in range(world)])))
    assert equal(whole, torch.cat([values(10 * r + rank, shape, dtype) for r in range(world)]))
    tensor = empty()
    works = [dist.isend(made(of[rank]), (rank + 1) % world), dist.irecv(tensor, (rank - 1) % world)]
    for work in works:
        work.wait()
    assert equal(tensor, of[rank - 1])
    lists = [[empty(), empty()] for _ in range(world)]
    dist.group.WORLD.allgather_coalesced(lists, [made(of[rank]), made(of[0])]).wait()
    assert all(equal(pair[0], of[r]) and equal(pair[1], of[0]) for r, pair in enumerate(lists))


def reductions(rank: int, world: int, dtype: torch.dtype, shape: tuple[int, ...], gaps: bool) -> None:
    """All reducing collectives. The sums are small whole numbers, exact in every type."""
    made = strided if gaps else (lambda tensor: tensor)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    of = [values(r, shape, dtype) for r in range(world)]
    total = sum(x.to(wide) for x in of).to(dtype)

    tensor = made(of[rank].clone())
    dist.all_reduce(tensor)
    assert equal(tensor, total)
    tensor = made(of[rank].clone())
    dist.reduce(tensor, 1)
    assert equal(tensor, total if rank == 1 else of[rank])
    tensor = made(torch.zeros(shape, dtype=dtype))
    dist.reduce_scatter(tensor, [made(x) for x in [of[rank]] * world])
    assert equal(tensor, total)
    dist.reduce_scatter_single(tensor, made(torch.cat([of[rank]] * world)))
    assert equal(tensor, total)
    pair = [made(of[rank].clone()), made(of[rank].clone())]
    dist.group.WORLD.allreduce_coalesced(pair).wait()
    assert equal(pair[0], total) and equal(pair[1], total)
    if not dtype.is_complex and dtype not in UNSIGNED:
        tensor = made(of[rank].clone())
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        assert equal(tensor, torch.stack([x.to(wide) for x in of]).amax(0).to(dtype) if tensor.numel() else tensor)


SHAPES = [(0,), (0, 3), (5,), (4, 3), (70_001,)]


def all_dtypes(rank: int, world: int, gaps: bool) -> None:
    for shape in SHAPES:
        for dtype in REAL + UNSIGNED + COMPLEX + MOVED_ONLY:
            moves(rank, world, dtype, shape, gaps)
        for dtype in REAL + UNSIGNED + COMPLEX:
            reductions(rank, world, dtype, shape, gaps)


@pytest.mark.parametrize("gaps", [False, True], ids=["contiguous", "with gaps"])
def test_every_dtype_and_shape_in_every_collective(gaps: bool) -> None:
    run_ranks(WORLD, all_dtypes, gaps, timeout_s=200)


def what_is_not_defined(rank: int, world: int) -> None:
    cases: list[tuple[Any, str]] = [
        (lambda: dist.all_reduce(torch.zeros(2, dtype=torch.float8_e4m3fn)), "cannot reduce"),
        (lambda: dist.all_reduce(torch.zeros(2, dtype=torch.bool), op=dist.ReduceOp.AVG), "AVG is not defined"),
        (lambda: dist.all_reduce(torch.zeros(2, dtype=torch.complex64), op=dist.ReduceOp.MAX), "complex"),
        (lambda: dist.all_reduce(torch.zeros(2), op=dist.ReduceOp.BXOR), "not defined for float32"),
        (lambda: dist.all_gather([torch.zeros(2)] * world, torch.zeros(2, dtype=torch.int32)), "dtype|type"),
        (lambda: dist.all_gather_single(torch.zeros(world * 2 + 1), torch.zeros(2)), "multiple|size|bytes"),
        (lambda: dist.broadcast(torch.zeros(1).expand(5), 0), "share memory"),
        (lambda: dist.broadcast(torch.sparse_coo_tensor((4, 4)), 0), "(?i)sparse"),
        (lambda: dist.send(torch.zeros(1), rank), "itself|same rank|Invalid"),
        (lambda: dist.all_to_all_single(torch.zeros(3), torch.zeros(3), [1, 1], [1, 1]), "split"),
    ]
    for number, (call, text) in enumerate(cases):
        try:
            call()
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            assert re.search(text, str(error)), (number, str(error))
        else:
            raise AssertionError(f"case {number}, which {text!r}, raised nothing")
    dist.barrier()  # nobody was harmed


def test_what_is_not_defined_is_one_clear_error() -> None:
    run_ranks(WORLD, what_is_not_defined)
