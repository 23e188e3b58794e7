"""DDP with compression: no further from the fp32 run than Gloo with PyTorch's own hook of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.digests import digest
from support.ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mccl_core

HOOKS = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}
STEPS = 40
SEEDS = range(4)


def train(
    rank: int, world: int, seed: int, group: dist.ProcessGroup, hook: Callable[..., Any] | None, **ddp_options: Any
) -> tuple[torch.Tensor, str]:
    """Losses of all ranks' samples [steps, samples], and the digest of the weights at the end."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.1, **ddp_options)
    if hook is not None:
        # DDP refuses bf16_compress_hook by its name where there is no NCCL; Gloo adds bf16 all the same.
        ddp.register_comm_hook(group, lambda state, bucket: hook(state, bucket))
    # Smooth, and without Adam, which makes the smallest gradients as large as all others: what deviates is what was
    # rounded, and not what chance made of it since.
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed((seed * STEPS + step) * world + rank)
        x = torch.randn(32, 64, generator=generator)
        y = (x[:, :10] + torch.randn(32, 10, generator=generator)).argmax(1)
        optimizer.zero_grad()
        scores = ddp(x)
        nn.functional.cross_entropy(scores, y).backward()
        optimizer.step()
        losses.append(nn.functional.cross_entropy(scores.detach().double(), y, reduction="none"))
    everyones = [torch.empty(STEPS, 32, dtype=torch.float64) for _ in range(world)]
    dist.all_gather(everyones, torch.stack(losses))
    return torch.cat(everyones, 1), digest(torch.cat([p.flatten() for p in model.parameters()]))


def rms(values: list[torch.Tensor]) -> float:
    return torch.cat([value.flatten() for value in values]).square().mean().sqrt().item()


def deviations(rank: int, world: int, backend: str) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """How far losses are from those of the same backend's fp32 run: root mean squares over samples and over steps."""
    found = {}
    digests = []
    for name, hook in HOOKS.items():
        if backend == "mccl":
            group = dist.new_group(backend="mccl", pg_options=mccl_core.Options(compression=name))
            hook = None
        else:
            group = dist.group.WORLD
        differences = []
        for seed in SEEDS:
            whole, _ = train(rank, world, seed, dist.group.WORLD, None)
            rounded, weights = train(rank, world, seed, group, hook)
            digests.append(weights)
            differences.append(rounded - whole)
        found[name] = (rms(differences), rms([difference.mean(1) for difference in differences]))
    return found, digests


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_losses_deviate_no_more_than_with_gloo_and_pytorchs_hook() -> None:
    ours = run_ranks(4, deviations, "mccl", timeout_s=300)
    theirs = run_ranks(4, deviations, "gloo", backend="gloo", timeout_s=300)
    assert all(digests == ours[0][1] for _, digests in ours), "the ranks' models differ"
    for name in HOOKS:
        for what, mine, gloos in zip(("samples", "steps"), ours[0][0][name], theirs[0][0][name], strict=True):
            print(f"{name}: losses of {what} are {mine:.3g} from fp32's, Gloo's with PyTorch's hook {gloos:.3g}")
            assert 0 < mine <= 1.2 * gloos


def options_of_ddp(rank: int, world: int) -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        for compression in ("bf16", "topk"):
            job = {"MCCL_COMPRESSION": compression, "MCCL_COMPRESSION_MIN_NBYTES": "1024", "MCCL_TOPK_WARMUP": "5"}
            losses, weights = train(rank, world, 0, group_with(job), None, **options)
            learned = (losses[:5].mean() - losses[-5:].mean()).item()
            assert learned > 0.03, f"{compression}, {options}: it does not learn: {losses.mean(1)}"
            all_weights: list[Any] = [None] * world
            dist.all_gather_object(all_weights, weights)
            assert set(all_weights) == {weights}, f"{compression}, {options}: the ranks' models differ"


def group_with(variables: dict[str, str]) -> dist.ProcessGroup:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        return dist.new_group(backend="mccl")


def test_it_learns_with_every_option_of_ddp() -> None:
    run_ranks(2, options_of_ddp, timeout_s=120)


def integer_bitmap(rank: int, world: int) -> None:
    group = dist.new_group(backend="mccl", pg_options=mccl_core.Options(compression="bf16"))
    with pytest.raises(TypeError, match=r"SUM of int32.*set MCCL_COMPRESSION for the job"):
        train(rank, world, 0, group, None, find_unused_parameters=True)
    dist.barrier()  # the other rank's gradients need this one until it has been refused too


def test_ddps_own_integers_are_refused_by_a_compressed_group_with_advice() -> None:
    run_ranks(2, integer_bitmap)


def fully_sharded(rank: int, world: int) -> tuple[list[float], int, int]:
    """Losses, and the bytes that this rank sent for reduce-scatters and for all-gathers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mccl_core.reset_metrics()
    losses = []
    for step in range(20):
        generator = torch.Generator().manual_seed(step * world + rank)
        x = torch.randn(32, 64, generator=generator)
        y = (x[:, :10] + torch.randn(32, 10, generator=generator)).argmax(1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ops = mccl_core.get_metrics()["ops"]
    return losses, ops["reduce_scatter"]["sent_bytes"], ops["all_gather"]["sent_bytes"]


def test_fsdp_scatters_half_the_bytes_and_gathers_whole_parameters() -> None:
    whole, scattered, gathered = run_ranks(2, fully_sharded)[0]
    losses, half, same = run_ranks(2, fully_sharded, MCCL_COMPRESSION="bf16", MCCL_COMPRESSION_MIN_NBYTES="0")[0]
    assert scattered > 0 and half == scattered / 2 and same == gathered
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(whole), rtol=2e-3, atol=0)
    assert losses != whole
