"""The digits job learns as well when each worker sends a hundredth of its gradient's elements."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.digests import digest
from support.digits import DIGITS, logged
from support.ranks import run_ranks
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EPOCHS = 15  # as in configs/jobs/digits.yaml
SEEDS = (1, 2, 3)
WITH_TOPK = """
import os, runpy, sys
os.environ.update(MCCL_COMPRESSION="topk", MCCL_TOPK_RATIO="0.01")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("digits_script", DIGITS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def accuracies(rank: int, world: int, script: Any) -> tuple[list[float], list[str]]:
    """What the script does, under plain DDP: validation accuracy by seed, and digests of the weights."""
    results, digests = [], []
    for seed in SEEDS:
        torch.manual_seed(seed)
        data = script.Digits(32, 0)
        data.setup("fit")
        module = script.Classifier(2e-3)
        network = DistributedDataParallel(module.network, process_group=dist.new_group(backend="mccl"))
        optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
        sampler = DistributedSampler(data.train, world, rank, seed=seed)
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for images, labels in DataLoader(data.train, 32, sampler=sampler):
                optimizer.zero_grad()
                cross_entropy(network(images), labels).backward()
                optimizer.step()
        images, labels = next(iter(DataLoader(data.val, len(data.val))))
        with torch.no_grad():
            results.append((module.network(images).argmax(1) == labels).float().mean().item())
        digests.append(digest(torch.cat([p.flatten() for p in network.parameters()])))
    return results, digests


def test_topk_at_one_per_cent_is_within_a_point() -> None:
    script = load_script()
    found = {}
    for compression in ("none", "topk"):
        ranks = run_ranks(2, accuracies, script, timeout_s=400, MCCL_COMPRESSION=compression, MCCL_TOPK_RATIO="0.01")
        assert ranks[0][1] == ranks[1][1], "the ranks' models differ"
        found[compression] = ranks[0][0]
    means = {name: statistics.mean(values) for name, values in found.items()}
    print(f"validation accuracy by seed: {found}, means: {means}")
    assert found["topk"] != found["none"], "nothing was compressed"
    assert means["topk"] >= means["none"] - 0.01


def test_the_script_itself_learns_with_topk(script: Callable, run_fleet: Callable, tmp_path: Path) -> None:
    ranks = run_fleet(script(WITH_TOPK), DIGITS, "--epochs", EPOCHS, world_size=2)
    assert ranks[0].returncode == 0, ranks[0].output
    accuracy = logged(tmp_path / "rank0", "val_acc")[-1]
    print(f"validation accuracy of the script: {accuracy}")
    assert accuracy >= 0.95
