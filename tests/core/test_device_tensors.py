"""Collectives on a device's tensors, through torch.distributed: real ranks, each with a simulated device.

The device's kernels run late, on a thread; what has to be in order with them is then only in order by the hand-off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.device_collectives import SHAPE, WORLD, check_each
from support.ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from mccl_core import ddp
from mccl_core._C import SimulatedDevice


@contextlib.contextmanager
def device_of(rank: int, private: bool = False) -> Iterator[SimulatedDevice]:
    device = SimulatedDevice(seed=rank, longest_delay_us=500, private_memory=private)
    try:
        yield device
    finally:
        device.close()


class LateKernels:
    """`Kernels` on a simulated device."""

    def __init__(self, device: SimulatedDevice, rank: int) -> None:
        self.rank = rank
        self._device = device

    def filled(self, value: float, *shape: int, strided: bool = False) -> torch.Tensor:
        assert not strided, "copies that PyTorch makes on the CPU do not wait for the simulated device"
        tensor = torch.full(shape or SHAPE, -1.0)
        self._device.fill(tensor, value)
        return tensor

    def seen(self, tensors: list[torch.Tensor]) -> list[float]:
        copies = [torch.zeros(tensor.shape) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            self._device.copy(copy, tensor)
        self._device.synchronize()
        return [copy.flatten()[0].item() if (copy == copy.flatten()[0]).all() else float("nan") for copy in copies]


def run_each(rank: int, world: int, private: bool) -> None:
    with device_of(rank, private) as device:
        for _ in range(3):
            check_each(LateKernels(device, rank))


@pytest.mark.parametrize("private", [False, True], ids=["shared memory", "private memory"])
def test_each_collective_reads_after_the_kernels_and_is_read_after_the_engine(private: bool) -> None:
    run_ranks(WORLD, run_each, private)


def wait_for_nothing(rank: int, world: int) -> None:
    with device_of(rank) as device:
        data = torch.full(SHAPE, -1.0)
        device.hold()
        device.fill(data, rank + 1)
        works = []
        for _ in range(4):
            works.append(dist.all_reduce(data, async_op=True))
            assert works[-1].wait()  # although the device has not even begun
        assert not any(work.is_completed() for work in works)
        out = torch.zeros(SHAPE)
        device.copy(out, data)
        device.resume()
        device.synchronize()
        # Each all-reduce reads what the one before it has left: three ranks, four times.
        assert (out == 6 * 3**3).all()
        assert all(work.is_completed() for work in works)


def test_the_cpu_never_waits_for_the_device() -> None:
    run_ranks(WORLD, wait_for_nothing)


def wait_with_a_timeout(rank: int, world: int) -> str:
    with device_of(rank) as device:
        device.hold()
        data = torch.ones(10)
        work = dist.all_reduce(data, async_op=True)
        future = work.get_future()
        text = ""
        try:
            work.wait(timedelta(milliseconds=50))
        except dist.DistBackendError as error:
            text = str(error)
        assert not future.done()
        device.resume()
        future.wait()
        assert (data == world).all()  # in memory, without any wait on the device
        return text


def test_a_wait_with_a_timeout_blocks_and_a_future_completes_when_the_result_is_in_memory() -> None:
    for text in run_ranks(2, wait_with_a_timeout):
        assert "gave up after 50 ms" in text


def use_only_the_future(rank: int, world: int) -> None:
    with device_of(rank, private=True) as device:
        on = LateKernels(device, rank)
        data = on.filled(rank + 1)
        dist.all_reduce(data, async_op=True).get_future().wait()
        assert on.seen([data]) == [6.0]  # nobody has called wait(), yet the copy from staging comes first


def test_a_future_orders_results_that_come_by_way_of_staging() -> None:
    run_ranks(WORLD, use_only_the_future)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def gradients(rank: int, hook: ddp.Hook | None, *, on_device: bool = False) -> list[torch.Tensor]:
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.04, gradient_as_bucket_view=True)
    if hook is not None:
        model.register_comm_hook(None, hook)
    for step in range(3):
        model.zero_grad(set_to_none=False)
        loss = model(torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank))).sum()
        if not on_device:
            loss.backward()
            continue
        with device_of(rank) as device, ThreadPoolExecutor(1) as autograd:
            dist.all_reduce(torch.ones(4))  # binds this thread; a device's backward runs on another
            device.hold()
            autograd.submit(loss.backward).result()  # returns although no all-reduce can have begun
            device.resume()
            device.synchronize()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def train_with_and_without_the_hook(rank: int, world: int) -> None:
    wanted = gradients(rank, None)
    for on_device in (False, True):
        found = gradients(rank, ddp.ddp_hook, on_device=on_device)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    for hook, tolerance in ((ddp.fp16_ddp_hook, 2e-3), (ddp.bf16_ddp_hook, 2e-2)):
        for a, b in zip(gradients(rank, hook), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_ddp_with_the_hook_lets_the_device_wait_and_finds_the_same_gradients() -> None:
    run_ranks(2, train_with_and_without_the_hook)


def test_hooks_that_go_on_in_then_are_replaced_or_refused() -> None:
    assert ddp.hook_for_mps(None) is ddp.ddp_hook
    assert ddp.hook_for_mps(default_hooks.fp16_compress_hook) is ddp.fp16_ddp_hook
    with pytest.raises(ValueError, match=r"powerSGD_hook cannot be used on MPS: .*Future\.then.*bf16_compress_hook"):
        ddp.hook_for_mps(powerSGD_hook.powerSGD_hook)


def fail(rank: int, world: int) -> None:
    with device_of(rank) as device:
        data = torch.full((1000,), -1.0)
        device.hold()
        device.fill(data, 1.0)
        work = dist.all_reduce(data, async_op=True)
        work.wait()
        seen = torch.zeros(1000)
        device.copy(seen, data)
        store = dist.distributed_c10d._get_default_store()
        store.set(f"rank {rank} waits", "")
        store.wait([f"rank {r} waits" for r in range(world)])  # else the other rank's abort may come before
        dist.group.WORLD._get_backend(torch.device("cpu")).abort()
        device.resume()
        device.synchronize()
        assert seen.isnan().all(), "the device read a result that there is none of"
        with pytest.raises(dist.DistBackendError, match="abort"):
            dist.all_reduce(data)


def test_a_failed_op_leaves_nan_to_the_device_and_the_next_call_raises() -> None:
    run_ranks(2, fail)


def call_from_other_threads(rank: int, world: int) -> None:
    with device_of(rank), ThreadPoolExecutor(1) as pool:
        dist.all_reduce(torch.ones(4))
        with pytest.raises(ValueError, match="another thread"):
            pool.submit(dist.all_reduce, torch.ones(4)).result()


def test_a_collective_on_another_thread_than_the_first_is_refused() -> None:
    run_ranks(2, call_from_other_threads)
