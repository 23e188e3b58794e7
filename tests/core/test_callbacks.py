"""Callbacks that communicate: what they start meets what the same callback starts on the other ranks, whenever each
rank runs it. PowerSGD's hook does this; here each rank is late at points of its own."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch._dynamo  # an optimizer imports it: once here, and not in each rank
import torch.distributed as dist
from support.ranks import run_ranks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

CHAINS = 24


def chains(rank: int, world: int, seed: int) -> None:
    generator = random.Random(seed * 100 + rank)

    def late() -> None:
        # Now and then long enough for the op to complete first: its callback runs on this thread then.
        time.sleep(generator.choice([0, 0, 0.0005, 0.004]))

    def start(chain: int) -> torch.futures.Future:
        # All ops have one size: nothing but their names can tell them apart.
        future = dist.all_reduce(torch.full((100,), float(chain + rank)), async_op=True).get_future()
        late()

        def second(done: torch.futures.Future) -> torch.Tensor:
            late()
            tensor = done.value()[0] + 1000
            return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

        def third(done: torch.futures.Future) -> torch.Tensor:
            late()
            tensor = done.value() + 1
            nested = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True).get_future()
            # A callback of an op that a callback started.
            return nested.then(lambda f: dist.all_reduce(f.value()[0], async_op=True).get_future().wait()[0]).wait()

        return future.then(second).then(third)

    futures = []
    plain = []
    for chain in range(CHAINS):
        futures.append(start(chain))
        late()
        tensor = torch.full((100,), float(rank * chain))  # and ops of the main thread in between
        plain.append((tensor, dist.all_reduce(tensor, async_op=True)))
    for chain, future in enumerate(futures):
        first = world * chain + sum(range(world))
        expected = ((first + 1000) * world + 1) * world
        assert torch.equal(future.wait(), torch.full((100,), float(expected))), chain
    for chain, (tensor, work) in enumerate(plain):
        work.wait()
        assert tensor[0].item() == chain * sum(range(world))


@pytest.mark.parametrize("world", [2, 4])
def test_chains_of_callbacks_match_whenever_they_run(world: int) -> None:
    for seed in range(3):
        run_ranks(world, chains, seed)


def errors_travel(rank: int, world: int) -> None:
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()

    def breaks(_: torch.futures.Future) -> None:
        raise ValueError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        future.then(breaks).then(lambda f: f.value()).wait()
    seen = []
    future.add_done_callback(lambda f: seen.append(f.value()[0].item()))
    assert seen == [world]
    group = dist.new_group()
    works = dist.all_reduce(torch.ones(10 + rank), group=group, async_op=True)
    with pytest.raises(dist.DistBackendError, match="mismatch"):
        works.get_future().wait()
    with pytest.raises(RuntimeError, match="mismatch"):
        works.get_future().then(lambda f: f.value()).wait()


def test_an_error_reaches_the_end_of_a_chain() -> None:
    run_ranks(2, errors_travel)


def waits_are_not_slow(rank: int, world: int) -> float:
    def again(done: torch.futures.Future) -> torch.Tensor:
        return dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0]

    start = time.monotonic()
    for _ in range(50):
        dist.all_reduce(torch.ones(10), async_op=True).get_future().then(again).wait()
    return time.monotonic() - start


def test_a_callback_that_waits_holds_up_nobody() -> None:
    took = min(max(run_ranks(2, waits_are_not_slow)) for _ in range(3))
    assert took < 50 * 0.045, "each nested wait costs as much as a thread's patience"


def train_with_powersgd(rank: int, world: int, blocking: bool) -> torch.Tensor:
    generator = random.Random(rank)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(48, 48) for _ in range(8)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)  # several buckets
    state = powersgd.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations themselves
        future = powersgd.powerSGD_hook(state, bucket)
        if blocking:
            future.wait()
        else:
            time.sleep(generator.choice([0, 0, 0.002]))
        return future

    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(8, 48, generator=torch.Generator().manual_seed(step * world + rank))
        ddp(x).pow(2).mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_powersgd_with_several_buckets_is_the_same_in_every_run_and_on_every_rank() -> None:
    one_at_a_time = run_ranks(4, train_with_powersgd, True)
    for _ in range(2):
        for weights in run_ranks(4, train_with_powersgd, False):
            assert torch.equal(weights, one_at_a_time[0])
