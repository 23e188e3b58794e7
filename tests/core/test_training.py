"""Training with all that torch builds on a backend, on four ranks: the same losses as over Gloo with the same seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer imports it: once here, and not in each rank
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WORLD = 4
STEPS = 12


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step * WORLD + rank)
    return torch.randn(16, 32, generator=generator), torch.randint(0, 10, (16,), generator=generator)


def mean(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / WORLD


def steps(module: nn.Module, rank: int, *, first: int = 0, same_batch: bool = False) -> list[float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    return train(module, optimizer, 0 if same_batch else rank, range(first, first + STEPS))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, data: int, numbers: range) -> list[float]:
    losses = []
    for step in numbers:
        x, y = batch(step, data)
        loss = nn.functional.cross_entropy(module(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(mean(loss))
    return losses


def ddp(rank: int, world: int, **options: Any) -> list[float]:
    return steps(DistributedDataParallel(model(), bucket_cap_mb=0.05, **options), rank)


def ddp_static_graph(rank: int, world: int) -> list[float]:
    return ddp(rank, world, static_graph=True)


def ddp_bucket_views(rank: int, world: int) -> list[float]:
    return ddp(rank, world, gradient_as_bucket_view=True)


def ddp_no_sync(rank: int, world: int) -> list[float]:
    module = DistributedDataParallel(model(), bucket_cap_mb=0.05)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    for step in range(3 * STEPS):
        last = step % 3 == 2
        x, y = batch(step, rank)
        with contextlib.nullcontext() if last else module.no_sync():
            loss = nn.functional.cross_entropy(module(x), y) / 3
            loss.backward()
        losses.append(mean(loss))
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def join(rank: int, world: int) -> list[float]:
    module = DistributedDataParallel(model(), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses = []
    with Join([module]):
        for step in range(4 + 3 * rank):  # uneven inputs
            x, y = batch(step, rank)
            loss = nn.functional.cross_entropy(module(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return [*losses, mean(module.module[0].weight.detach().sum())]


def fsdp(rank: int, world: int) -> list[float]:
    return steps(sharded(), rank)


def sharded() -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    module = model()
    for layer in (module[0], module[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def hybrid_fsdp(rank: int, world: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = model()
    fully_shard(module, mesh=mesh)
    return steps(module, rank)


def tensor_parallel(rank: int, world: int) -> list[float]:
    mesh = init_device_mesh("cpu", (WORLD,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return steps(parallelize_module(model(), mesh, plan), rank, same_batch=True)


def dtensor(rank: int, world: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(1)
    full = torch.randn(22, 14)  # neither is a multiple of the mesh
    values = []
    for placements in ([Shard(0), Replicate()], [Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(0)]):
        tensor = distribute_tensor(full, mesh, placements)
        assert torch.equal(tensor.full_tensor(), full)
        moved = tensor.redistribute(mesh, [Shard(1), Replicate()])
        product = moved @ distribute_tensor(full, mesh, [Replicate(), Shard(0)]).t()
        torch.testing.assert_close(product.full_tensor(), full @ full.t(), rtol=1e-4, atol=1e-4)
        values += [product.full_tensor().sum().item(), tensor.sum().full_tensor().item()]
    return values


def checkpoints(rank: int, world: int) -> list[float]:
    folder = dist.get_backend()  # in the test's own
    module = sharded()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = train(module, optimizer, rank, range(STEPS))
    weights, moments = get_state_dict(module, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    straight_on = train(module, optimizer, rank, range(STEPS, 2 * STEPS))

    again = sharded()
    new_optimizer = torch.optim.AdamW(again.parameters(), lr=1e-3)
    weights, moments = get_state_dict(again, new_optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(again, new_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    resumed = train(again, new_optimizer, rank, range(STEPS, 2 * STEPS))
    assert resumed == straight_on
    return losses + resumed


@pytest.mark.parametrize(
    "body",
    [
        ddp,
        ddp_static_graph,
        ddp_bucket_views,
        ddp_no_sync,
        join,
        fsdp,
        hybrid_fsdp,
        tensor_parallel,
        dtensor,
        checkpoints,
    ],
)
def test_losses_equal_those_over_gloo(
    body: Callable[[int, int], list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ours = run_ranks(WORLD, body, timeout_s=120)
    theirs = run_ranks(WORLD, body, backend="gloo", timeout_s=120)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(reference), rtol=1e-6, atol=1e-6)


def hooked(rank: int, world: int, name: str) -> list[float]:
    # One bucket: over Gloo the callbacks of several may meet in another order on each rank.
    module = DistributedDataParallel(model())
    if name == "fp16":
        module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if name == "bf16":
        # By another name: torch refuses the hook itself where there is no NCCL.
        module.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
    if name == "powersgd":
        state = powersgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)
        module.register_comm_hook(state, powersgd.powerSGD_hook)
    return steps(module, rank)


def deviation(losses: list[float], plain: list[float]) -> float:
    return (torch.tensor(losses) - torch.tensor(plain)).norm().item()


@pytest.fixture(scope="module")
def plain_losses() -> Iterator[list[float]]:
    yield run_ranks(WORLD, hooked, "none", backend="gloo")[0]


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
def test_compressing_hooks_deviate_no_more_than_over_gloo(hook: str, plain_losses: list[float]) -> None:
    ours = deviation(run_ranks(WORLD, hooked, hook)[0], plain_losses)
    theirs = deviation(run_ranks(WORLD, hooked, hook, backend="gloo")[0], plain_losses)
    assert 0 < ours <= 1.2 * theirs, f"{hook}: {ours:.3g}, over Gloo {theirs:.3g}"
