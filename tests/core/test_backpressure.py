"""A rank that comes late is not flooded: what is parked for it, or by it for others, stays within the pools of credit.

The others post all they have to post. The late rank, which has posted nothing, watches its engine fill up: once a pool
is used up and nothing grows any more, it posts, too.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from mccl_core import _runtime

WORLD = 4
LATE = WORLD - 1
OPS = 8
ELEMENTS = 2_000_000  # 8 MB
SENDERS = {"ring": 1, "circulant": 2}  # how many others send to one rank; each has a pool at its receiver
POOLS = [4 * 1024 * 1024, 64 * 1024]  # the default; the least that can be set
QUIET_SAMPLES = 100  # so many in a row that are the same: nothing grows any more


def parked_nbytes() -> int:
    runtime = _runtime.current_runtime()
    assert runtime is not None
    return runtime.engine.parked_nbytes()


class Peak:
    """The most bytes that this process has parked from entering to leaving the context."""

    nbytes = 0

    def __enter__(self) -> Self:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.0005):
            self.nbytes = max(self.nbytes, parked_nbytes())


def wait_until_full(pools_nbytes: int) -> None:
    """Until these pools are used up, and then until the bytes that are parked here no longer change.

    Less than a quarter of them may be owed to the senders, for bytes that were taken at once.
    """
    unchanged, before = 0, -1
    while unchanged < QUIET_SAMPLES:
        time.sleep(0.001)
        now = parked_nbytes()
        unchanged = unchanged + 1 if now == before and now > pools_nbytes * 3 // 4 else 0
        before = now


def summand(rank: int, op: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(op)
    return torch.randint(0, 65536, (ELEMENTS,), generator=generator).float() * 2**rank


def one_late_rank(rank: int, world: int, pools_nbytes: int) -> tuple[int, int]:
    dist.all_reduce(torch.ones(1))
    tensors = [summand(rank, op) for op in range(OPS)]
    store = dist.distributed_c10d._get_default_store()
    with Peak() as waiting:
        if rank == LATE:
            wait_until_full(pools_nbytes)
            store.set("late rank goes", "")
        else:
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            store.wait(["late rank goes"])
    with Peak() as catching_up:
        if rank == LATE:
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
    for op, tensor in enumerate(tensors):
        assert torch.equal(tensor, summand(0, op) * (2**world - 1)), f"op {op}"
    return waiting.nbytes, catching_up.nbytes


@pytest.mark.parametrize("algorithm", SENDERS)
@pytest.mark.parametrize("pool_nbytes", POOLS)
def test_a_late_rank_parks_no_more_than_its_pools(pool_nbytes: int, algorithm: str) -> None:
    env: dict[str, Any] = {"MCCL_CREDIT_NBYTES": str(pool_nbytes), "MCCL_ALLREDUCE_ALGO": algorithm}
    most = pool_nbytes * SENDERS[algorithm]
    peaks = run_ranks(WORLD, one_late_rank, most, **env)
    assert all(waiting <= most and catching_up <= most for waiting, catching_up in peaks), (most, peaks)
    assert peaks[LATE][0] > most * 3 // 4, "the late rank's pools were not used up: nothing was put to the test"


def one_late_slow_rank(rank: int, world: int, pool_nbytes: int) -> int:
    # Products of halves are slow: slower than the bytes come in.
    tensor = torch.full((32_000_000,), 2.0 + rank, dtype=torch.float16)
    with Peak() as peak:
        if rank == 0:
            wait_until_full(pool_nbytes)
        dist.reduce(tensor, 0, op=dist.ReduceOp.PRODUCT)
    assert rank != 0 or torch.equal(tensor, torch.full_like(tensor, 6.0))
    return peak.nbytes


def test_a_late_rank_parks_no_more_while_it_takes_what_is_parked() -> None:
    pool_nbytes = POOLS[0]
    peaks = run_ranks(2, one_late_slow_rank, pool_nbytes)
    assert pool_nbytes * 3 // 4 < peaks[0] <= pool_nbytes * 2, peaks  # two ranks have a connection each way
