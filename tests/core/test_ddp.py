"""DistributedDataParallel and torchrun: no import of ours, the same losses as over Gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("mccl")
model = DistributedDataParallel(torch.nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    optimizer.zero_grad()
    loss = model(torch.full((8, 10), float(dist.get_rank() + step))).pow(2).mean()
    loss.backward()
    optimizer.step()
weights = [torch.empty(1, 10) for _ in range(dist.get_world_size())]
dist.all_gather(weights, model.module.weight.detach())
assert all(torch.equal(w, weights[0]) for w in weights), "the ranks' models differ"
print(f"rank {dist.get_rank()} of {dist.get_world_size()} done")
dist.destroy_process_group()
"""


def test_torchrun_with_a_script_that_names_only_the_backend(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=4", script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(4):
        assert f"rank {rank} of 4 done" in done.stdout


def train(rank: int, world: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    # Small buckets: several all-reduces are in flight during one backward.
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.1)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    losses = []
    for step in range(20):
        generator = torch.Generator().manual_seed(step * world + rank)
        x = torch.randn(32, 64, generator=generator)
        y = torch.randint(0, 10, (32,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    return losses


def test_losses_equal_those_over_gloo() -> None:
    ours = run_ranks(4, train)[0]
    theirs = run_ranks(4, train, backend="gloo")[0]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-6, atol=1e-6)
