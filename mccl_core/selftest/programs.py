"""What the two ranks of a check run. Each program returns its figures, or raises where a result is wrong.

Every program takes the device as a string, "cpu" or "mps". Nothing here waits for a device but where it says so: that
the framework's thread never has to is what is tested.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

Figures = dict[str, Any]
_MS = 1e3


def synchronize(device: str) -> None:
    """Waits until the device has run what was given to it."""
    if device == "mps":
        torch.mps.synchronize()


def require(condition: bool, text: str) -> None:
    """Ends the check where a result is wrong; unlike `assert` also under `python -O`."""
    if not condition:
        raise ValueError(text)


def sums(rank: int, device: str, count: int) -> Figures:
    """Sums of every type against float64: vDSP's and NEON's kernels on a Mac, the portable ones elsewhere."""
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64]
    if device == "cpu":
        dtypes.append(torch.float64)  # Metal has none
    figures: Figures = {"element_count": count}
    for dtype in dtypes:
        inputs = [_numbers(count, dtype, seed) for seed in range(dist.get_world_size())]
        tensor = inputs[rank].to(device, copy=True)
        dist.all_reduce(tensor)
        exact = torch.stack([x.double() for x in inputs]).sum(0)
        worst = float(((tensor.cpu().double() - exact).abs() / exact.abs().clamp(min=1)).max())
        # One addition: half a unit in the last place of the type, and exact for integers.
        bound = torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0
        name = str(dtype).removeprefix("torch.")
        require(worst <= bound, f"{name}: relative error {worst:.3g}, allowed {bound:.3g}")
        figures[f"{name}_relative_error"] = worst
    return figures


def _numbers(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (torch.rand(count, generator=generator, dtype=torch.float64) * 8 - 4).to(dtype)
    return torch.randint(-1000, 1000, (count,), generator=generator).to(dtype)


def unified_storage(rank: int, device: str) -> Figures:
    """A process's first MPS tensor makes the backend check PyTorch's storage; then two ranks reduce a slice of one."""
    whole = torch.zeros(3, 1000, device=device)
    whole[1] = rank + 1
    dist.all_reduce(whole[1])
    seen = (whole * 2).cpu()
    require(bool((seen[1] == 6).all()), "the GPU does not see the sum that the CPU wrote")
    require(bool((seen[0] == 0).all() and (seen[2] == 0).all()), "the sum was written beside its place")
    return {"nbytes": whole.nbytes}


def simulated_device(rank: int, device: str, op_count: int, private_memory: bool) -> Figures:
    """A thread plays a GPU whose kernels run late, on host memory: the order of kernels and engine, without a GPU."""
    from mccl_core._C import SimulatedDevice

    played = SimulatedDevice(seed=rank, longest_delay_us=500, private_memory=private_memory)
    try:
        copies = []
        for index in range(op_count):
            tensor = torch.full((1 + index * 37 % 5_000,), -1.0)
            played.fill(tensor, rank + index)
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait()  # is queued, as the kernels are
            copies.append(torch.zeros_like(tensor))
            played.copy(copies[-1], tensor)
        played.synchronize()
    finally:
        played.close()
    bad = sum(int((copy != 2 * index + 1).sum()) for index, copy in enumerate(copies))
    require(bad == 0, f"{bad} wrong elements in {op_count} all-reduces")
    return {"op_count": op_count}


def bursts(rank: int, device: str, op_count: int) -> Figures:
    """Asynchronous all-reduces of random sizes, waited for out of order, with no synchronization of the host."""
    shared, own = random.Random(1), random.Random(100 + rank)
    open_ops: list[tuple[int, dist.Work, torch.Tensor]] = []
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    moved_nbytes = 0

    def finish() -> None:
        nonlocal wrong
        index, work, tensor = open_ops.pop(own.randrange(len(open_ops)))
        work.wait()
        wrong = wrong + (tensor != 2 * index + 1).sum()

    started_s = time.perf_counter()
    for index in range(op_count):
        size = shared.choice([1, 100, 10_000, 300_000])
        tensor = torch.empty(size, device=device)
        tensor.fill_(index + rank)
        moved_nbytes += tensor.nbytes
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        open_ops.append((index, work, tensor))
        while len(open_ops) > 24:
            finish()
    while open_ops:
        finish()
    enqueued_s = time.perf_counter() - started_s
    bad = int(wrong)  # the first time that the host looks
    require(bad == 0, f"{bad} wrong elements in {op_count} all-reduces")
    total_s = time.perf_counter() - started_s
    return {"op_count": op_count, "bytes": moved_nbytes, "enqueued_s": enqueued_s, "total_s": total_s}


def trajectories(rank: int, device: str, step_count: int) -> Figures:
    """DDP steps with no look at the loss: weights equal on both ranks and close to those of one process."""
    data = torch.Generator().manual_seed(7)
    inputs = torch.randn(step_count, 32, 64, generator=data)
    targets = torch.randn(step_count, 32, 8, generator=data)
    model = DistributedDataParallel(_model().to(device), bucket_cap_mb=0.05, gradient_as_bucket_view=True)
    _train(model, inputs[:, rank::2].to(device), targets[:, rank::2].to(device))
    weights = torch.cat([p.detach().flatten() for p in model.module.parameters()])
    others = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weights)
    require(all(torch.equal(weights, other) for other in others), "the ranks' weights differ")
    alone = _model().to(device)
    _train(alone, inputs.to(device), targets.to(device))
    reference = torch.cat([p.detach().flatten() for p in alone.parameters()])
    worst = float((weights - reference).abs().max() / reference.abs().max())
    require(worst < 1e-3, f"the weights are {worst:.3g} (relative) from those of one process after {step_count} steps")
    return {"step_count": step_count, "relative_error": worst}


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    nn = torch.nn
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))


def _train(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def allocator_reuse(rank: int, device: str, round_count: int) -> Figures:
    """Tensors that are dropped while their op is in flight, and others that take their memory at once."""
    random_sizes = random.Random(5)
    kept: list[tuple[int, torch.Tensor]] = []
    works: list[dist.Work] = []
    for index in range(round_count):
        size = random_sizes.randrange(1, 400_000)
        dropped = torch.full((size,), float(index), device=device)
        work = dist.all_reduce(dropped, async_op=True)
        del dropped
        garbage = torch.full((size,), float("nan"), device=device)  # the allocator may give the same memory
        result = torch.full((size,), float(rank + index), device=device)
        other = dist.all_reduce(result, async_op=True)
        assert work is not None
        assert other is not None
        works += [work, other]
        kept.append((index, result))
        del garbage
        if len(kept) == 16:
            _check_kept(works, kept)
    _check_kept(works, kept)
    return {"round_count": round_count}


def _check_kept(works: list[dist.Work], kept: list[tuple[int, torch.Tensor]]) -> None:
    for work in works:
        work.wait()
    for index, tensor in kept:
        require(bool((tensor == 2 * index + 1).all()), f"round {index}: wrong sum")
    works.clear()
    kept.clear()


def late_peer(rank: int, device: str, late_s: float) -> Figures:
    """Rank 1 joins late: rank 0's command buffer waits for an event that long, and what follows must still be right."""
    tensor = torch.full((100_000,), float(rank + 1), device=device)
    synchronize(device)
    dist.barrier()
    if rank == 1:
        time.sleep(late_s)
    started_s = time.perf_counter()
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    doubled = tensor * 2  # after the wait, on the stream
    enqueued_s = time.perf_counter() - started_s
    value = float(doubled[-1])
    require(value == 6.0, f"got {value} after a wait of {late_s:g} s, expected 6")
    waited_s = time.perf_counter() - started_s
    if rank == 0:
        require(waited_s > 0.9 * late_s, f"waited for {waited_s:.2f} s only")
    return {"late_s": late_s, "enqueued_s": enqueued_s, "waited_s": waited_s}


def late_device(rank: int, device: str, busy_s: float) -> Figures:
    """The kernels that write the tensor take long: the engine must not read it before they have."""
    x = torch.randn(2048, 2048, device=device)
    product = x @ x
    synchronize(device)
    started_s = time.perf_counter()
    for _ in range(8):
        product = x @ x
    synchronize(device)
    repeats = max(1, int(busy_s / max((time.perf_counter() - started_s) / 8, 1e-5)))
    dist.barrier()
    tensor = torch.full((100_000,), -1e6, device=device)
    for _ in range(repeats):
        product = x @ x
    tensor.copy_(torch.full_like(tensor, float(rank + 1)) + 0 * product[0, 0])
    started_s = time.perf_counter()
    dist.all_reduce(tensor)
    enqueued_s = time.perf_counter() - started_s
    require(bool((tensor == 3).all()), "the engine read a tensor that was not written yet")
    return {"kernel_count": repeats, "enqueued_s": enqueued_s, "total_s": time.perf_counter() - started_s}


def overlap(rank: int, device: str, bucket_count: int, bucket_nbytes: int, compute_ratio: float) -> Figures:
    """The synthetic step of arXiv 2610.39029: buckets that become ready one after another during compute.

    Compute is made `compute_ratio` times as long as the all-reduces alone. `hidden` is the share of these that the
    whole step does not show: 1 - (step - compute) / all-reduces.
    """
    buckets = [torch.ones(bucket_nbytes // 4, device=device) for _ in range(bucket_count)]
    x = torch.randn(1024, 1024, device=device)

    def compute(repeats: int) -> None:
        for _ in range(repeats):
            torch.tanh(x @ x)

    def step(repeats: int, communicate: bool) -> None:
        works = []
        for bucket in buckets:
            compute(repeats)
            if communicate:
                works.append(dist.all_reduce(bucket, op=dist.ReduceOp.AVG, async_op=True))
        for work in works:
            assert work is not None
            work.wait()

    wire_s = _median_s(device, lambda: step(0, True))
    probe_s = _median_s(device, lambda: compute(10)) / 10
    repeats = max(1, round(compute_ratio * wire_s / bucket_count / probe_s))
    agreed = torch.tensor([float(repeats)], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    repeats = int(agreed)
    compute_s = _median_s(device, lambda: step(repeats, False))
    step_s = _median_s(device, lambda: step(repeats, True))
    require(all(bool((bucket == 1).all()) for bucket in buckets), "an average of ones is not one")
    return {
        "bucket_count": bucket_count,
        "bucket_nbytes": bucket_nbytes,
        "all_reduce_ms": wire_s * _MS,
        "compute_ms": compute_s * _MS,
        "step_ms": step_s * _MS,
        "hidden": 1 - max(0.0, step_s - compute_s) / wire_s,
    }


def _median_s(device: str, function: Callable[[], None], count: int = 5) -> float:
    times = []
    for _ in range(count + 1):
        dist.barrier()
        synchronize(device)
        started_s = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - started_s)
    return statistics.median(times[1:])


PROGRAMS: dict[str, Callable[..., Figures]] = {
    program.__name__: program
    for program in (
        unified_storage,
        simulated_device,
        sums,
        bursts,
        trajectories,
        allocator_reuse,
        late_peer,
        late_device,
        overlap,
    )
}
