"""What a rank sees when another one dies, leaves, is late, or calls something else: one clear error, soon."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, run_ranks_to_the_end


def caught(function: object) -> str:
    """Runs it; returns the text of the DistBackendError that it must raise."""
    with pytest.raises(dist.DistBackendError) as info:
        function()
    return str(info.value)


def different_collectives(rank: int, world: int) -> str:
    tensor = torch.ones(10)
    return caught(lambda: dist.broadcast(tensor, 0) if rank == 1 else dist.all_reduce(tensor))


def different_roots(rank: int, world: int) -> str:
    def broadcast() -> None:
        dist.broadcast(torch.ones(10), rank)
        for _ in range(100):
            dist.barrier()

    return caught(broadcast)


def different_sizes(rank: int, world: int) -> str:
    return caught(lambda: dist.all_reduce(torch.ones(100 + rank // 2)))


def different_dtypes(rank: int, world: int) -> str:
    return caught(lambda: dist.all_reduce(torch.ones(100, dtype=torch.int32 if rank == 2 else torch.float32)))


@pytest.mark.parametrize("mismatch", [different_collectives, different_roots, different_sizes, different_dtypes])
def test_a_mismatch_names_both_sides_on_every_rank(mismatch: object) -> None:
    texts = run_ranks(4, mismatch)
    assert all("mismatch" in text for text in texts)
    assert any("where rank" in text for text in texts)
    for text in texts:  # the op that found it is the one that is named
        both = re.search(r"rank \d+: (\w+) #.* where rank \d+ called (\w+)\(", text)
        assert both is None or both[1] == both[2], text


def killed_peer(rank: int, world: int) -> tuple[str, float, str]:
    dist.all_reduce(torch.ones(1))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    works = []

    def reduce_many() -> None:
        works.extend(dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(8))
        for work in works:
            work.wait()

    text = caught(reduce_many)
    took = time.monotonic() - start
    return text, took, caught(lambda: dist.all_reduce(torch.ones(1)))


def test_a_killed_rank_is_named_by_all_others_soon() -> None:
    outcomes = run_ranks_to_the_end(4, killed_peer, timeout_s=60)
    assert outcomes[2].exit_code == -signal.SIGKILL
    for rank in (0, 1, 3):
        assert outcomes[rank].text == "", outcomes[rank].text
        text, took, again = outcomes[rank].result
        assert "rank 2" in text and "log" in text
        assert took < 5.0  # a second, and room for a busy machine
        assert "rank 2" in again, "the next call on the group must fail, too"


def late_peer(rank: int, world: int) -> str | None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 1:
        store = dist.distributed_c10d._get_default_store()
        store.wait(["others_gave_up"], timedelta(seconds=30))
        return None
    text = caught(lambda: dist.all_reduce(torch.ones(4), group=group))
    if rank == 0:
        dist.distributed_c10d._get_default_store().set("others_gave_up", "1")
    return text


def test_a_late_rank_is_named_when_the_timeout_passes() -> None:
    texts = run_ranks(2, late_peer)
    assert "timeout" in texts[0] and "rank 1" in texts[0] and "has not joined" in texts[0]


def wait_with_timeout(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["gave_up"], timedelta(seconds=30))
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        return
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    assert "gave up" in caught(lambda: work.wait(timedelta(milliseconds=50)))
    store.set("gave_up", "1")
    work.wait()  # the op itself went on
    assert torch.equal(tensor, torch.full((4,), 2.0))


def test_a_wait_with_a_timeout_leaves_the_op_alone() -> None:
    run_ranks(2, wait_with_timeout)


def leaves_early(rank: int, world: int) -> str:
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group(group)
        return ""
    return caught(lambda: [dist.all_reduce(torch.ones(1), group=group) for _ in range(2)])


def test_a_rank_that_destroys_its_group_is_named_by_those_who_go_on() -> None:
    texts = run_ranks(3, leaves_early)
    assert all("rank 1" in texts[rank] and "destroyed the group" in texts[rank] for rank in (0, 2))


def new_group_after_error(rank: int, world: int) -> None:
    group = dist.new_group()
    caught(lambda: dist.all_reduce(torch.ones(10 + rank), group=group))
    again = dist.new_group()
    tensor = torch.ones(300_000)
    dist.all_reduce(tensor, group=again)
    assert tensor[0].item() == world
    dist.all_reduce(tensor)


def test_a_new_group_works_in_the_same_processes_after_an_error() -> None:
    run_ranks(3, new_group_after_error)


def bad_arguments(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="not defined for float32"):
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND)
    with pytest.raises(ValueError, match="AVG is not defined for bool"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG)
    with pytest.raises((ValueError, RuntimeError), match="multiple of the world size"):
        dist.reduce_scatter_single(torch.empty(1), torch.empty(world + 1))
    dist.barrier()  # nobody was harmed


def test_bad_arguments_are_errors_on_the_rank_alone() -> None:
    run_ranks(2, bad_arguments)


def test_ranks_that_choose_different_algorithms_are_told() -> None:
    def body(rank: int, world: int) -> str:
        if rank == 1:
            os.environ["MCCL_ALLREDUCE_ALGO"] = "ring"
        group = dist.new_group(backend="mccl")
        return caught(lambda: dist.all_reduce(torch.ones(100), group=group))

    texts = run_ranks(2, body, backend="gloo")
    assert all("mismatch" in text for text in texts)
    assert any("ring" in text and "recursive_doubling" in text for text in texts)


def different_splits(rank: int, world: int) -> str:
    # Rank 0 sends rank 1 two rows, of which rank 1 expects none.
    sent, received = ([0, 2], [0, 1]) if rank == 0 else ([1, 0], [0, 0])

    def exchange() -> None:
        dist.all_to_all_single(torch.empty(sum(received)), torch.ones(sum(sent)), received, sent)
        for _ in range(100):  # rank 0's own exchange was complete: it is told a little later
            dist.barrier()

    return caught(exchange)


def test_bytes_that_nobody_expects_are_a_mismatch() -> None:
    texts = run_ranks(2, different_splits)
    assert all("mismatch" in text and "expects nothing" in text for text in texts)


def callbacks_that_wait(rank: int, world: int) -> None:
    # What PowerSGD's hook does: a future's callback starts another all-reduce and waits for it.
    def again(future: torch.futures.Future) -> torch.Tensor:
        tensor = future.value()[0]
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

    for _ in range(3):
        future = dist.all_reduce(torch.ones(100_000), async_op=True).get_future().then(again)
        assert future.wait()[0].item() == world**2


def test_a_callback_may_wait_for_another_op() -> None:
    run_ranks(2, callbacks_that_wait)


def futures_alone(rank: int, world: int) -> None:
    for _ in range(200):
        future = dist.all_reduce(torch.ones(10), async_op=True).get_future()  # the work is dropped at once
        assert future.wait()[0][0].item() == world


def test_a_future_outlives_its_work() -> None:
    run_ranks(2, futures_alone)


def results_that_cannot_be_written(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="share memory"):
        dist.all_reduce(torch.ones(1).expand(4))
    with torch.inference_mode():
        tensor = torch.ones(4, 4).t()[1:]
        dist.all_reduce(tensor)
        assert tensor[0, 0].item() == world


def test_overlapping_and_inference_tensors() -> None:
    run_ranks(2, results_that_cannot_be_written)


def again_over_the_same_store(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    for _ in range(3):
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("mccl", store=store, rank=rank, world_size=world)
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        assert tensor[0].item() == world


def test_a_group_can_be_made_again_over_the_same_store() -> None:
    run_ranks(2, again_over_the_same_store)


def churn(rank: int, world: int) -> tuple[int, int]:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = None
    for cycle in range(12):
        group = dist.new_group()
        dist.all_reduce(torch.ones(100), group=group)
        dist.destroy_process_group(group)
        if cycle == 2:
            before = descriptors(), threads()
    assert before is not None
    assert descriptors() <= before[0] and threads() <= before[1]
    return before


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc, which is Linux's")
def test_groups_that_come_and_go_leave_no_descriptor_and_no_thread() -> None:
    run_ranks(3, churn)


def forked_child(rank: int, world: int) -> None:
    dist.all_reduce(torch.ones(1))
    pid = os.fork()
    if pid == 0:
        # What a DataLoader's worker does: it lives on without the group, and holds none of its sockets.
        from mccl_core import get_metrics

        os._exit(0 if get_metrics()["ops"] == {} else 1)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    assert tensor[0].item() == world


def test_a_forked_child_lets_go_of_the_engine() -> None:
    run_ranks(2, forked_child)


FORKS = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("mccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
pid = os.fork()
if pid == 0:
    try:
        dist.all_reduce(torch.ones(3))
    except ValueError as error:
        assert "forked" in str(error)
        sys.exit(7)  # with all of Python's clean-up
    sys.exit(1)
_, status = os.waitpid(pid, 0)
print("child", os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_can_end_as_usual() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["child", "7"], done.stderr
