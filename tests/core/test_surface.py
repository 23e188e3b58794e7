"""What c10d asks of a backend beyond plain collectives: coalescing, any source, groups from groups, errors, time."""

from __future__ import annotations

import copy
import json
import random
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, run_ranks_to_the_end
from torch.distributed import distributed_c10d

CPU = torch.device("cpu")


def backend_of(group: dist.ProcessGroup | None = None) -> Any:
    return (group or dist.group.WORLD)._get_backend(CPU)


def coalescing(rank: int, world: int) -> None:
    # The fast path: one call of the coalesced form.
    tensors = [torch.full((n,), float(rank + n)) for n in (3, 1000, 0, 70_000)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for n, tensor in zip((3, 1000, 0, 70_000), tensors, strict=True):
        assert torch.equal(tensor, torch.full((n,), float(sum(r + n for r in range(world)))))
    # The general one: start, any calls, end.
    a, b, c = torch.full((5,), float(rank)), torch.full((7,), float(rank)), torch.empty(world)
    with dist._coalescing_manager(device=CPU, async_ops=True) as manager:
        dist.group.WORLD.allreduce([a])
        dist.group.WORLD.broadcast(b, 1)
        dist.group.WORLD._allgather_base(c, torch.tensor([float(rank)]))
    manager.wait()
    assert torch.equal(a, torch.full((5,), float(sum(range(world)))))
    assert torch.equal(b, torch.full((7,), 1.0))
    assert torch.equal(c, torch.arange(float(world)))
    group = dist.group.WORLD
    group._start_coalescing(CPU)
    with pytest.raises(RuntimeError, match="nested"):
        group._start_coalescing(CPU)
    works = group._end_coalescing(CPU)
    assert works.wait() and works.is_completed()
    with pytest.raises(RuntimeError, match="no coalescing block"):
        group._end_coalescing(CPU)


def coalesced_forms(rank: int, world: int) -> None:
    mixed = [torch.tensor([rank]), torch.tensor([rank / 2]), torch.tensor([rank * 3])]  # of two dtypes
    dist.group.WORLD.allreduce_coalesced(mixed).wait()
    total = sum(range(world))
    assert [t.item() for t in mixed] == [total, total / 2, total * 3]

    inputs = [torch.full((4, 2), rank), torch.full((3,), rank + 0.5), torch.empty(0)]
    outputs = [torch.empty(world * 4, 2, dtype=torch.int64), torch.empty(world * 3), torch.empty(0)]
    work = dist.group.WORLD.allgather_into_tensor_coalesced(outputs, inputs)
    work.wait()
    assert torch.equal(outputs[0], torch.arange(world).repeat_interleave(4)[:, None].expand(-1, 2))
    assert torch.equal(outputs[1], torch.arange(world).repeat_interleave(3) + 0.5)

    # Odd sizes, several dtypes and strides; checked against the plain form.
    inputs = [torch.arange(world * 5.0) + rank, torch.arange(world * 3) * (rank + 1), torch.ones(2, world).t() * rank]
    outputs = [torch.empty(5), torch.empty(3, dtype=torch.int64), torch.empty(1, 2)]
    dist.group.WORLD.reduce_scatter_tensor_coalesced(outputs, inputs).wait()
    for got, given in zip(outputs, inputs, strict=True):
        expected = torch.empty_like(got)
        dist.reduce_scatter_single(expected, given.contiguous())
        assert torch.equal(got, expected)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("body", [coalescing, coalesced_forms])
def test_coalescing(body: Any, world: int) -> None:
    run_ranks(world, body)


def any_source(rank: int, world: int) -> None:
    rounds = 7
    if rank > 0:
        for i in range(rounds):
            for tag in range(3):
                dist.send(torch.full((1 + 5000 * tag,), float(100 * rank + i)), 0, tag=tag)
        dist.send(torch.empty(0), 0, tag=7)  # empty: it can be taken all the same
        return
    taken: dict[tuple[int, int], list[float]] = {}
    for tag in [2, 0, 1] * (rounds * (world - 1)):
        tensor = torch.empty(1 + 5000 * tag)
        source = dist.recv(tensor, tag=tag)
        assert (tensor == tensor[0]).all()
        taken.setdefault((source, tag), []).append(tensor[0].item())
    for source in range(1, world):
        for tag in range(3):  # each was taken once, and none was overtaken
            assert taken[source, tag] == [100 * source + i for i in range(rounds)]
    sources = {dist.recv(torch.empty(0), tag=7) for _ in range(1, world)}
    assert sources == set(range(1, world))


def any_source_before_a_named_one(rank: int, world: int) -> None:
    # The first receive takes the first message, though the second names its sender.
    if rank == 0:
        first, second = torch.empty(3), torch.empty(3)
        works = [dist.irecv(first), dist.irecv(second, 1)]
        works[0].wait()
        assert first[0] == 1 and works[0]._source_rank() == 1
        dist.send(torch.ones(1), 1)
        works[1].wait()
        assert second[0] == 2
    if rank == 1:
        dist.send(torch.full((3,), 1.0), 0)
        dist.recv(torch.empty(1), 0)
        dist.send(torch.full((3,), 2.0), 0)


def many_at_once(rank: int, world: int) -> None:
    # Receives are posted before, while and after the messages arrive; large ones wait for grants.
    generator = random.Random(rank)
    if rank == 0:
        tensors = [torch.empty(300_000) for _ in range(12 * (world - 1))]
        works = [dist.irecv(tensor) for tensor in tensors]
        for work, tensor in zip(works, tensors, strict=True):
            work.wait()
            assert (tensor == work._source_rank()).all()
    else:
        for _ in range(12):
            time.sleep(generator.random() / 500)
            dist.send(torch.full((300_000,), float(rank)), 0)


@pytest.mark.parametrize("body", [any_source, any_source_before_a_named_one, many_at_once])
def test_receive_from_any_source(body: Any) -> None:
    run_ranks(3, body)
    run_ranks(3, body, MCCL_CREDIT_NBYTES="65536")


def nobody_can_send(rank: int, world: int) -> str:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank > 0:
        dist.barrier()
        return ""
    with pytest.raises(dist.DistBackendError) as info:
        dist.recv(torch.empty(1), group=group)
    dist.barrier()
    return str(info.value)


def test_a_receive_from_any_source_times_out_and_says_so() -> None:
    text = run_ranks(2, nobody_can_send)[0]
    assert "timeout" in text and "any source" in text


def all_senders_leave(rank: int, world: int) -> str:
    group = dist.new_group()
    dist.barrier(group)
    if rank > 0:
        dist.destroy_process_group(group)
        return ""
    with pytest.raises(dist.DistBackendError) as info:
        dist.recv(torch.empty(1), group=group)
    return str(info.value)


def test_a_receive_from_any_source_ends_when_nobody_is_left() -> None:
    assert "destroyed the group" in run_ranks(3, all_senders_leave)[0]


def integer_means(rank: int, world: int) -> None:
    generator = torch.Generator().manual_seed(5)
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        info = torch.iinfo(dtype)
        # The sums of these do not fit the type.
        all_values = torch.randint(info.min, info.max, (world, 64), dtype=dtype, generator=generator)
        all_values[:, 0], all_values[:, 1] = info.max, info.min
        exact = [sum(int(all_values[r, i]) for r in range(world)) for i in range(64)]
        expected = torch.tensor([abs(s) // world * (1 if s >= 0 else -1) for s in exact], dtype=dtype)
        mine = all_values[rank].clone()
        dist.all_reduce(mine, op=dist.ReduceOp.AVG)
        assert torch.equal(mine, expected), dtype
        strided = torch.stack([all_values[rank]] * 2, 1)[:, 0]
        dist.all_reduce(strided, op=dist.ReduceOp.AVG)
        assert torch.equal(strided, expected)
        at_root = all_values[rank].clone()
        dist.reduce(at_root, 0, op=dist.ReduceOp.AVG)
        assert torch.equal(at_root, expected if rank == 0 else all_values[rank])
        piece = torch.empty(64, dtype=dtype)
        dist.reduce_scatter_single(piece, all_values[rank].repeat(world), op=dist.ReduceOp.AVG)
        assert torch.equal(piece, expected)
        several = [all_values[rank].clone(), all_values[rank][:3].clone()]
        dist.group.WORLD.allreduce_coalesced(several, average()).wait()
        assert torch.equal(several[0], expected) and torch.equal(several[1], expected[:3])


def average() -> Any:
    options = distributed_c10d.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.AVG
    return options


@pytest.mark.parametrize("world", [2, 3, 5])
def test_integer_means_are_exact(world: int) -> None:
    run_ranks(world, integer_means)


def sparse(rank: int, world: int) -> None:
    indices = torch.tensor([[rank, rank + 1, 5], [0, 2, 1]])
    tensor = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 4.0 + rank]), (8, 3))
    expected = torch.zeros(8, 3)
    for r in range(world):
        expected[r, 0] += 1
        expected[r + 1, 2] += 2
        expected[5, 1] += 4 + r
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), expected)
    empty = torch.sparse_coo_tensor((4, 4))
    dist.all_reduce(empty)
    assert empty._nnz() == 0
    with pytest.raises((RuntimeError, ValueError), match="only SUM"):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    with pytest.raises((RuntimeError, ValueError), match="same"):
        dist.all_reduce(torch.sparse_coo_tensor((4, 4 + rank)))


def test_all_reduce_of_sparse_tensors() -> None:
    run_ranks(3, sparse)


def premul_sum(rank: int, world: int) -> None:
    for factor in (0.5, torch.tensor([0.25])):
        op = dist._make_nccl_premul_sum(factor)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            tensor = torch.full((9,), float(rank + 1), dtype=dtype)
            dist.all_reduce(tensor, op=op)
            total = float(factor) * sum(range(1, world + 1))
            assert torch.equal(tensor, torch.full((9,), total, dtype=dtype))
            piece = torch.empty(2, dtype=dtype)
            given = torch.full((2 * world,), float(rank + 1), dtype=dtype)
            dist.reduce_scatter_single(piece, given, op=op)
            assert torch.equal(piece, torch.full((2,), total, dtype=dtype)) and given[0] == rank + 1
    with pytest.raises(TypeError, match="floating-point"):
        dist.all_reduce(torch.ones(1, dtype=torch.int32), op=dist._make_nccl_premul_sum(2.0))


def test_premul_sum() -> None:
    run_ranks(3, premul_sum)


def splitting(rank: int, world: int) -> None:
    whole = dist.group.WORLD
    backend = backend_of()
    assert backend.supports_splitting
    options = copy.deepcopy(backend.options)
    assert options._timeout == backend.options._timeout
    halves = [[0, 2], [1, 3]]
    half = whole.split_group(halves[rank % 2], timeout=timedelta(seconds=30), group_name=f"half{rank % 2}")
    tensor = torch.tensor([float(rank)])
    half.allreduce([tensor]).wait()
    assert tensor.item() == sum(halves[rank % 2]) and half.size() == 2 and half.rank() == rank // 2
    # Ranks that are not in a group get none. Others use it meanwhile, and the group that it comes from.
    pair = whole.split_group([1, 2], group_name="pair")
    assert (pair is None) == (rank in (0, 3))
    if pair is not None:
        pair.barrier().wait()
    dist.barrier()
    # Overlapping groups over one listener, made in one order, used in different ones.
    groups = [dist.new_group(ranks) for ranks in ([0, 1, 2], [1, 2, 3], [0, 3], [0, 1, 2, 3])]
    mine = [g for g in groups if dist.get_rank(g) >= 0]
    works = []
    for group in mine if rank % 2 else reversed(mine):
        value = torch.ones(10_000)
        works.append((group, value, dist.all_reduce(value, group=group, async_op=True)))
    for group, value, work in works:
        work.wait()
        assert value[0].item() == dist.get_world_size(group)


def test_groups_from_groups() -> None:
    run_ranks(4, splitting)


def sequence_numbers(rank: int, world: int) -> None:
    backend = backend_of()
    before = backend._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    if rank < 2:  # messages between two ranks do not count: the others know nothing of them
        other = torch.empty(1)
        works = [dist.isend(torch.ones(1), 1 - rank), dist.irecv(other, 1 - rank)]
        for work in works:
            work.wait()
    assert backend._get_sequence_number_for_group() == before + 3
    numbers: list[Any] = [None] * world
    number = backend._get_sequence_number_for_group()
    dist.all_gather_object(numbers, number)
    assert len(set(numbers)) == 1


def work_in_detail(rank: int, world: int) -> None:
    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert 0 < work._get_duration() < 60_000
    assert work.is_success() and work.exception() is None
    assert work.get_future_result().wait() == 0  # c10d's WorkResult.SUCCESS
    assert work.get_future().wait()[0] is not None
    backend = backend_of()
    backend._set_default_timeout(timedelta(seconds=50))
    assert backend.options._timeout == timedelta(seconds=50)
    from torch.distributed.distributed_c10d import _get_pg_default_device

    assert _get_pg_default_device() == CPU
    assert dist.Backend.default_device_backend_map["mps"] == "mccl"
    with pytest.raises(ValueError, match="tag"):
        dist.group.WORLD.send([tensor], (rank + 1) % world, -1)


def test_sequence_numbers_and_works() -> None:
    run_ranks(3, sequence_numbers)
    run_ranks(2, work_in_detail)


def timeouts(rank: int, world: int) -> str:
    group = dist.new_group()
    if rank == 1:
        dist.barrier()
        return ""
    options = distributed_c10d.AllreduceOptions()
    options.timeout = timedelta(milliseconds=300)  # of this op alone
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as info:
        group.allreduce([torch.ones(1)], options).wait()
    assert time.monotonic() - start < 20
    assert backend_of(group).get_error().name == "TIMEOUT"
    dist.barrier()
    return str(info.value)


def test_a_timeout_of_one_op() -> None:
    text = run_ranks(2, timeouts)[0]
    assert "timeout" in text and "rank 1" in text


def set_timeout(rank: int, world: int) -> None:
    group = dist.new_group()
    assert backend_of(group).get_error().name == "SUCCESS"
    group.set_timeout(timedelta(milliseconds=300))
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="timeout"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()


def aborts(rank: int, world: int) -> str:
    group = dist.new_group()
    dist.barrier(group)
    dist.barrier()  # the one that aborts may be through the group's barrier before the others are
    if rank == 0:
        backend_of(group).abort()
    with pytest.raises(dist.DistBackendError) as info:
        dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    return str(info.value)


def shuts_down(rank: int, world: int) -> None:
    group = dist.new_group()
    dist.barrier(group)
    backend_of(group).shutdown()
    with pytest.raises(ValueError, match="destroyed"):
        dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()


def test_set_timeout_abort_and_shutdown() -> None:
    run_ranks(2, set_timeout)
    texts = run_ranks(3, aborts)
    assert all(re.search("rank 0 on .* aborted the group", text) for text in texts)
    run_ranks(2, shuts_down)


def monitored(rank: int, world: int) -> str:
    group = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=20))
    group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
    other = dist.new_group()
    if rank in (1, 3):
        dist.barrier()
        return ""
    with pytest.raises(dist.DistBackendError) as info:
        other.monitored_barrier(timedelta(milliseconds=500), wait_all_ranks=True)
    dist.barrier()
    return str(info.value)


def test_a_monitored_barrier_names_those_that_are_missing() -> None:
    texts = run_ranks(4, monitored)
    assert "Ranks 1, 3 failed to pass monitoredBarrier in 500 ms" in texts[0]
    assert "Rank 2 successfully reached monitoredBarrier" in texts[2]


def flight(rank: int, world: int) -> list[Any]:
    from mccl_core import flight_record

    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.all_reduce(torch.ones(10), group=group)
    stuck = None
    if rank == 0:
        stuck = dist.all_reduce(torch.ones(500), group=group, async_op=True)
    record = flight_record()
    if stuck is not None:
        with pytest.raises(dist.DistBackendError):
            stuck.wait()
    else:
        time.sleep(0.1)
    dist.barrier()
    return record


def test_the_flight_record_says_what_is_waited_for(tmp_path: Path) -> None:
    records = run_ranks(2, flight, MCCL_FLIGHT_RECORD_FILE=str(tmp_path / "flight-{rank}.json"))
    last = records[0][-1]
    assert last["state"] == "in flight" and last["peer"] == 1 and last["op"] == "all_reduce"
    assert last["nbytes"] == 2000 and last["duration_ms"] is None and last["ticket"] == 2
    assert records[1][-1]["state"] == "done" and records[1][-1]["duration_ms"] > 0
    written = json.loads((tmp_path / "flight-0.json").read_text())
    assert "timeout" in written["error"] and "rank 1" in written["error"]
    failed = [op for op in written["ops"] if op["state"] == "failed"]
    assert [(op["op"], op["nbytes"], op["peer"]) for op in failed] == [("all_reduce", 2000, 1)]


def few(rank: int, world: int) -> None:
    from mccl_core import flight_record

    for _ in range(20):
        dist.all_reduce(torch.ones(1))
    assert len(flight_record()) == 8 and [op["ticket"] for op in flight_record()] == list(range(13, 21))


def test_the_flight_record_keeps_the_latest_ops() -> None:
    run_ranks(2, few, MCCL_FLIGHT_RECORD_OPS="8")
    outcomes = run_ranks_to_the_end(2, lambda rank, world: dist.barrier(), MCCL_FLIGHT_RECORD_OPS="0")
    assert all(outcome.text == "" for outcome in outcomes)
