"""`import mccl`: served where no such package is installed, and what its functions do."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mccl_core
from mccl_core import guide
from mccl_core._autoload import GuideFinder
from mccl_core.config import MIB, CoreConfig
from mccl_core.settings import SettingsError


def python(code: str, *, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=os.environ | env, cwd=cwd
    )


NAMES = "print(all(callable(getattr(mccl, name)) for name in mccl.__all__ if not name.startswith('_')), mccl.__file__)"


@pytest.mark.parametrize("first", ["torch", "mccl_core"])
def test_import_mccl(first: str) -> None:
    done = python(f"import {first}, mccl; {NAMES}")
    assert done.stdout.split() == ["True", str(Path(guide.__file__))], done.stderr


def test_a_package_of_that_name_is_not_shadowed(tmp_path: Path) -> None:
    (tmp_path / "mccl").mkdir()
    (tmp_path / "mccl/__init__.py").write_text("whose = 'theirs'\n")
    done = python("import torch, mccl_core, mccl; print(mccl.whose)", cwd=tmp_path)
    assert done.stdout.split() == ["theirs"], done.stderr


def test_there_is_one_finder_and_it_is_cheap() -> None:
    done = python(
        "import sys, torch, mccl_core; print([type(f).__name__ for f in sys.meta_path].count('GuideFinder'),"
        "type(sys.meta_path[-1]).__name__, 'pydantic' in sys.modules, 'mccl_core.guide' in sys.modules)"
    )
    assert done.stdout.split() == ["1", "GuideFinder", "False", "False"], done.stderr
    assert GuideFinder().find_spec("mccl.other", None) is None


SCRIPT = """
import torch, mccl
mccl.init(timeout_s=77, allreduce_algo="ring", port_base=29000)
tensor = torch.ones(10)
torch.distributed.all_reduce(tensor)
ops = mccl.get_metrics()["ops"]["all_reduce"]
assert tensor[0] == 2 and list(ops["algorithms"]) == ["ring"], ops
mccl.reset_metrics()
assert mccl.get_metrics()["ops"]["all_reduce"]["count"] == 0
for late in (mccl.apply_thunderbolt_production_defaults, lambda: mccl.init(linger_ms=1)):
    try:
        late()
    except RuntimeError as error:
        print(error)
from mccl_core._runtime import current_runtime
assert 29000 <= current_runtime().port < 29600
torch.distributed.destroy_process_group()
"""


def test_init_makes_the_group_with_settings_that_win(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=os.environ | {"MCCL_ALLREDUCE_ALGO": "recursive_doubling"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("came after the first process group was made") == 4


def test_init_without_a_launcher_says_so() -> None:
    with pytest.raises(ValueError, match="start this script with torchrun"):
        guide.init()


def test_init_refuses_settings_that_there_are_not() -> None:
    with pytest.raises(SettingsError, match=r"segment_bytes: unknown key.*did you mean 'segment_nbytes'"):
        guide.init(segment_bytes=1)
    with pytest.raises(SettingsError, match=r"port_base: 0 \(argument\)"):
        guide.init(port_base=0)
    assert CoreConfig.from_environment().port_base == 29600


def test_thunderbolt_leaves_variables_alone() -> None:
    code = (
        "import torch, mccl; from mccl_core.config import CoreConfig;"
        "print(mccl.apply_thunderbolt_production_defaults());"
        "c = CoreConfig.from_environment(); print(c.segment_nbytes, c.credit_nbytes, c.socket_buffer_nbytes)"
    )
    done = python(code, MCCL_CHUNK_BYTES="65536")
    chosen, values = done.stdout.splitlines()
    assert chosen == str({"credit_nbytes": 8 * MIB, "socket_buffer_nbytes": 4 * MIB}), done.stderr
    assert values.split() == ["65536", str(8 * MIB), str(4 * MIB)]
    assert "for Thunderbolt: credit_nbytes=8388608, socket_buffer_nbytes=4194304" in done.stderr


def all_reduces(rank: int, world: int) -> list[int]:
    layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))  # 1 MiB each
    counts = []
    for model in (DistributedDataParallel(layers), DistributedDataParallel(layers, bucket_cap_mb=25)):
        model(torch.ones(1, 512)).sum().backward()  # the first backward has buckets of the first guess
        model(torch.ones(1, 512)).sum().backward()
        mccl_core.reset_metrics()
        model(torch.ones(1, 512)).sum().backward()
        counts.append(mccl_core.get_metrics()["ops"]["all_reduce"]["count"])
    return counts


def test_ddp_bucket_mb_holds_where_the_script_names_no_size() -> None:
    # Without a size torch makes a first bucket of 1 MiB, and with one it does not.
    assert run_ranks(2, all_reduces)[0] == [2, 1]
    assert run_ranks(2, all_reduces, DDP_BUCKET_MB="25")[0] == [1, 1]
    assert run_ranks(2, all_reduces, DDP_BUCKET_MB="1")[0] == [4, 1]


def op_timeout(rank: int, world: int) -> list[str]:
    texts = []
    for timeout in (None, timedelta(seconds=0.2)):
        group = dist.new_group(timeout=timeout)
        if rank == 0:
            with pytest.raises(dist.DistBackendError) as info:
                dist.all_reduce(torch.ones(1), group=group)
            texts.append(str(info.value))
        dist.barrier()
    return texts


def test_the_watchdogs_variable_limits_ops_of_groups_without_a_timeout() -> None:
    # The default group has a timeout of its own, which stays.
    texts = run_ranks(2, op_timeout, MCCL_WATCHDOG_TIMEOUT_MS="300")[0]
    assert all("rank 1" in text and "in time" in text for text in texts), texts
