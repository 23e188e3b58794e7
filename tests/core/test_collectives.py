"""Every collective but all-reduce, on sizes from nothing to several segments, against what it is defined to do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

COUNTS = [0, 1, 7, 1000, 200_003]
WORLDS = [2, 3, 5]


def pattern(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ((torch.arange(count) * 7 + rank * 13) % 251).to(dtype)


def broadcast(rank: int, world: int) -> None:
    for root in range(world):
        for count in COUNTS:
            tensor = pattern(rank, count)
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, pattern(root, count))


def reduce(rank: int, world: int) -> None:
    for root in range(world):
        for count in COUNTS:
            tensor = pattern(rank, count)
            dist.reduce(tensor, root)
            expected = sum(pattern(r, count) for r in range(world)) if rank == root else pattern(rank, count)
            assert torch.equal(tensor, expected)
    mean = torch.tensor([rank], dtype=torch.int64)
    dist.reduce(mean, 0, op=dist.ReduceOp.AVG)
    assert rank != 0 or mean.item() == sum(range(world)) // world


def all_gather(rank: int, world: int) -> None:
    for count in COUNTS:
        into = torch.empty(world * count)
        dist.all_gather_single(into, pattern(rank, count))
        expected = [pattern(r, count) for r in range(world)]
        assert torch.equal(into, torch.cat(expected))
        outputs = [torch.empty(count) for _ in range(world)]
        dist.all_gather(outputs, pattern(rank, count))
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    columns = [torch.zeros(6, 4) for _ in range(world)]
    dist.all_gather([c[:, 1] for c in columns], pattern(rank, 6))
    assert all(torch.equal(c[:, 1], pattern(r, 6)) and not c[:, 0].any() for r, c in enumerate(columns))


def reduce_scatter(rank: int, world: int) -> None:
    for count in COUNTS:
        inputs = [pattern(rank + 100 * r, count) for r in range(world)]
        untouched = [t.clone() for t in inputs]
        expected = sum(pattern(r + 100 * rank, count) for r in range(world))
        output = torch.empty(count)
        dist.reduce_scatter(output, inputs)
        assert torch.equal(output, expected)
        whole = torch.cat(inputs)
        dist.reduce_scatter_single(output, whole, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(output, expected / world)
        assert all(torch.equal(a, b) for a, b in zip(inputs, untouched, strict=True)), "the inputs were changed"
        assert torch.equal(whole, torch.cat(untouched))


def gather_and_scatter(rank: int, world: int) -> None:
    for root in range(world):
        for count in COUNTS:
            outputs = [torch.empty(count) for _ in range(world)] if rank == root else None
            dist.gather(pattern(rank, count), outputs, dst=root)
            if outputs is not None:
                assert all(torch.equal(o, pattern(r, count)) for r, o in enumerate(outputs))
            inputs = [pattern(r, count) for r in range(world)] if rank == root else None
            output = torch.empty(count)
            dist.scatter(output, inputs, src=root)
            assert torch.equal(output, pattern(rank, count))


def all_to_all(rank: int, world: int) -> None:
    for count in COUNTS:
        inputs = [pattern(rank * world + r, count) for r in range(world)]
        outputs = [torch.empty(count) for _ in range(world)]
        dist.all_to_all(outputs, inputs)
        assert all(torch.equal(o, pattern(r * world + rank, count)) for r, o in enumerate(outputs))
        single = torch.empty(world * count)
        dist.all_to_all_single(single, torch.cat(inputs))
        assert torch.equal(single, torch.cat(outputs))
    # Uneven: rank i sends i + j rows to rank j.
    send = [rank + r for r in range(world)]
    output = torch.empty(sum(send), 3)
    dist.all_to_all_single(output, torch.full((sum(send), 3), float(rank)), send, send)
    assert torch.equal(output, torch.cat([torch.full((r + rank, 3), float(r)) for r in range(world)]))


def point_to_point(rank: int, world: int) -> None:
    left, right = (rank - 1) % world, (rank + 1) % world
    for count in [1, 1000, 200_003, 3_000_000]:
        # Larger than any pool of credit: send and receive of all ranks must overlap.
        incoming = torch.empty(count)
        works = [dist.isend(pattern(rank, count), right), dist.irecv(incoming, left)]
        for work in works:
            work.wait()
        assert torch.equal(incoming, pattern(left, count))
    # Tags arrive in another order than they are asked for.
    if rank == 0:
        for tag in (3, 1, 2):
            dist.send(torch.tensor([float(tag)]), right, tag=tag)
    if rank == 1:
        for tag in (1, 2, 3):
            value = torch.empty(1)
            dist.recv(value, 0, tag=tag)
            assert value.item() == tag


def objects_and_groups(rank: int, world: int) -> None:
    gathered: list[object] = [None] * world
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": r, "text": "x" * r} for r in range(world)]
    box = [f"from {rank}"]
    dist.broadcast_object_list(box, src=world - 1)
    assert box == [f"from {world - 1}"]
    groups = [dist.new_group([r, (r + 1) % world]) for r in range(world)]  # each rank is in two
    # Each rank uses its two groups in another order than its neighbours: posted together, they cannot block each other.
    started = []
    for first in (rank, (rank - 1) % world):
        tensor = torch.tensor([float(rank)])
        started.append((first, tensor, dist.all_reduce(tensor, group=groups[first], async_op=True)))
    for first, tensor, work in started:
        work.wait()
        assert tensor.item() == first + (first + 1) % world
    dist.barrier()


def asynchronous(rank: int, world: int) -> None:
    tensors = [pattern(rank, 1 + 997 * i) for i in range(40)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for work in reversed(works):
        assert work.wait()
    for i, tensor in enumerate(tensors):
        assert torch.equal(tensor, sum(pattern(r, 1 + 997 * i) for r in range(world)))
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    assert torch.equal(future.then(lambda f: f.value()[0] * 2).wait(), torch.full((3,), 2.0 * world))
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    assert work.is_completed() and work.is_success()


def world_of_one(rank: int, world: int) -> None:
    tensor = torch.arange(5.0)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        dist.all_reduce(tensor, op=op)
    dist.broadcast(tensor, 0)
    dist.barrier()
    output = torch.empty(5)
    dist.all_gather_single(output, tensor)
    assert torch.equal(output, torch.arange(5.0))
    dist.reduce_scatter_single(output, tensor * 2)
    assert torch.equal(output, torch.arange(5.0) * 2)
    outputs = [torch.empty(5)]
    dist.all_to_all(outputs, [tensor])
    dist.gather(tensor, outputs, dst=0)
    assert torch.equal(outputs[0], tensor)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "collective",
    [
        broadcast,
        reduce,
        all_gather,
        reduce_scatter,
        gather_and_scatter,
        all_to_all,
        point_to_point,
        asynchronous,
    ],
)
def test_collective(collective: object, world: int) -> None:
    run_ranks(world, collective)


def test_objects_and_overlapping_groups() -> None:
    run_ranks(4, objects_and_groups)


def test_a_world_of_one_rank() -> None:
    run_ranks(1, world_of_one)


def small_credit(rank: int, world: int) -> None:
    point_to_point(rank, world)
    all_to_all(rank, world)
    reduce_scatter(rank, world)
    asynchronous(rank, world)
    big = pattern(rank, 1_000_000)
    dist.all_reduce(big)
    assert torch.equal(big, sum(pattern(r, 1_000_000) for r in range(world)))


@pytest.mark.parametrize("world", [2, 4])
def test_with_little_credit_everything_waits_for_grants(world: int) -> None:
    run_ranks(world, small_credit, MCCL_CREDIT_NBYTES="65536", MCCL_EAGER_GRANT_NBYTES="1000000000")
