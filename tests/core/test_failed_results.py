"""A failed op leaves NaN where its caller reads a floating-point result: never an old value or half a sum."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, run_ranks_to_the_end

WORLD = 4
LEAVER = 3  # never calls the op


def nothing_but_nan(tensor: torch.Tensor) -> bool:
    return bool(torch.isnan(tensor.float() if tensor.dtype.itemsize == 1 else tensor).all())


def all_reduce(make: Callable[..., torch.Tensor], rank: int) -> tuple[dist.Work, list[torch.Tensor]]:
    tensor = make(1000)
    return dist.all_reduce(tensor, async_op=True), [tensor]


def large_all_reduce(make: Callable[..., torch.Tensor], rank: int) -> tuple[dist.Work, list[torch.Tensor]]:
    tensor = make(500_000)
    return dist.all_reduce(tensor, async_op=True), [tensor]


def reduce(make: Callable[..., torch.Tensor], rank: int) -> tuple[dist.Work, list[torch.Tensor]]:
    tensor = make(1000)
    return dist.reduce(tensor, 0, async_op=True), [tensor] if rank == 0 else []


def reduce_scatter(make: Callable[..., torch.Tensor], rank: int) -> tuple[dist.Work, list[torch.Tensor]]:
    output = make(1000)
    return dist.reduce_scatter_tensor(output, make(1000 * WORLD), async_op=True), [output]


def broadcast(make: Callable[..., torch.Tensor], rank: int) -> tuple[dist.Work, list[torch.Tensor]]:
    tensor = make(1000)
    return dist.broadcast(tensor, LEAVER, async_op=True), [tensor]


def all_gather(make: Callable[..., torch.Tensor], rank: int) -> tuple[dist.Work, list[torch.Tensor]]:
    outputs = [make(1000) for _ in range(WORLD)]
    return dist.all_gather(outputs, make(1000), async_op=True), outputs


def gather(make: Callable[..., torch.Tensor], rank: int) -> tuple[dist.Work, list[torch.Tensor]]:
    outputs = [make(1000) for _ in range(WORLD)] if rank == 0 else []
    work = dist.gather(make(1000), outputs or None, 0, async_op=True)
    return work, outputs


def scatter(make: Callable[..., torch.Tensor], rank: int) -> tuple[dist.Work, list[torch.Tensor]]:
    output = make(1000)
    return dist.scatter(output, None, LEAVER, async_op=True), [output]


def all_to_all(make: Callable[..., torch.Tensor], rank: int) -> tuple[dist.Work, list[torch.Tensor]]:
    output = make(1000 * WORLD)
    return dist.all_to_all_single(output, make(1000 * WORLD), async_op=True), [output]


def receive(make: Callable[..., torch.Tensor], rank: int) -> tuple[dist.Work, list[torch.Tensor]]:
    tensor = make(1000)
    work = dist.irecv(tensor, LEAVER)
    assert work is not None
    return work, [tensor]


REDUCTIONS = [all_reduce, large_all_reduce, reduce, reduce_scatter]
COPIES = [broadcast, all_gather, gather, scatter, all_to_all, receive]
MUST_FAIL = {all_reduce, large_all_reduce, reduce_scatter, broadcast, all_gather, scatter, all_to_all, receive}


def abandoned(rank: int, world: int, dtype: torch.dtype, strided: bool, calls: list[Callable[..., object]]) -> None:
    def make(count: int) -> torch.Tensor:
        whole = torch.ones(count, 2 if strided else 1).to(dtype)
        return whole[:, 0] if strided else whole.flatten()

    for call in calls:
        group = dist.distributed_c10d._get_default_group()
        store = dist.distributed_c10d._get_default_store()
        started = f"started/{call.__name__}"
        if rank == LEAVER:
            store.wait([f"{started}/{other}" for other in range(world) if other != LEAVER])
            group._get_backend(torch.device("cpu")).abort()
        else:
            work, results = call(make, rank)
            store.set(f"{started}/{rank}", "1")
            try:
                work.wait()
                # Some ranks only send, and may have been done.
                assert call not in MUST_FAIL and not (call in (reduce, gather) and rank == 0)
            except dist.DistBackendError:
                assert all(nothing_but_nan(result) for result in results), call.__name__
        dist.destroy_process_group()
        dist.init_process_group("mccl", store=root_store(store), rank=rank, world_size=world)
    dist.barrier()  # nobody leaves while others still connect to it


def root_store(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_a_failed_op_leaves_nan(dtype: torch.dtype, strided: bool) -> None:
    run_ranks(WORLD, abandoned, dtype, strided, REDUCTIONS + COPIES)


@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling", "circulant"])
def test_a_failed_all_reduce_leaves_nan_whatever_the_algorithm(algorithm: str) -> None:
    run_ranks(WORLD, abandoned, torch.float32, False, [large_all_reduce], MCCL_ALLREDUCE_ALGO=algorithm)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2fnuz], ids=str)
def test_types_that_only_travel_are_nan_too(dtype: torch.dtype) -> None:
    run_ranks(WORLD, abandoned, dtype, False, COPIES)


def refused(rank: int, world: int, dtype: torch.dtype, strided: bool) -> None:
    """The group has failed already when the op is called."""

    def make(count: int) -> torch.Tensor:
        whole = torch.ones(count, 2 if strided else 1).to(dtype)
        return whole[:, 0] if strided else whole.flatten()

    group = dist.distributed_c10d._get_default_group()
    group._get_backend(torch.device("cpu")).abort()
    for call in (dist.all_reduce, lambda tensor: dist.broadcast(tensor, (rank + 1) % world), dist.recv):
        tensor = make(1000)
        with pytest.raises(dist.DistBackendError):
            call(tensor)
        assert nothing_but_nan(tensor)


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_an_op_that_is_refused_leaves_nan(dtype: torch.dtype, strided: bool) -> None:
    run_ranks(2, refused, dtype, strided)


def integers(rank: int, world: int) -> None:
    tensor = torch.full((10,), 7)
    if rank == 1:
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).abort()
        return
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(tensor)
    assert tensor.tolist() == [7] * 10  # they have no NaN: the error is all there is


def test_integers_are_left_alone() -> None:
    run_ranks(2, integers)


def half_reduced(rank: int, world: int) -> None:
    """Rank 1 dies in the middle of it: what was reduced already must not look like a result."""
    tensor = torch.ones(8_000_000)
    dist.all_reduce(torch.ones(1))
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 1:
        os.kill(os.getpid(), 9)
    try:
        work.wait()
    except dist.DistBackendError:
        assert torch.isnan(tensor).all()


def test_a_half_reduced_tensor_is_nan() -> None:
    outcomes = run_ranks_to_the_end(3, half_reduced)
    assert outcomes[0].text == "" and outcomes[2].text == ""
