"""Runs one check's program on two ranks of this machine, each a process of its own.

A process apiece and a check: a device that dies in one check is whole again in the next.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

WORLD = 2
_STORE_TIMEOUT_S = 120


class CheckFailed(Exception):
    """A rank raised, died or did not end; the text is the first rank's own account."""


def run_program(name: str, *, timeout_s: float, **arguments: Any) -> dict[str, Any]:
    """Runs `programs.PROGRAMS[name](rank=…, **arguments)` on both ranks; returns what rank 0 returned.

    Raises:
        CheckFailed: a rank did not return in time. No process is left.
    """
    with tempfile.TemporaryDirectory(prefix="mccl-selftest-") as folder:
        command = [sys.executable, "-m", __name__, name, folder, json.dumps(arguments)]
        environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONUNBUFFERED": "1"}
        ranks = []
        try:
            for rank in range(WORLD):
                log = Path(folder, f"rank{rank}.log").open("w")  # noqa: SIM115  closed below
                with log:
                    ranks.append(subprocess.Popen([*command, str(rank)], env=environ, stdout=log, stderr=log))
            return _collect(ranks, Path(folder), time.monotonic() + timeout_s, timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _collect(ranks: list[subprocess.Popen[bytes]], folder: Path, deadline: float, timeout_s: float) -> dict[str, Any]:
    hung = []
    for rank, process in enumerate(ranks):
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            hung.append(rank)
    problems = []
    for rank, process in enumerate(ranks):
        result = folder / f"rank{rank}.json"
        outcome = json.loads(result.read_text()) if result.exists() else {}
        if "error" in outcome:
            problems.append(f"rank {rank}: {outcome['error']}")
        elif rank in hung:
            problems.append(f"rank {rank} did not end within {timeout_s:.0f} s")
        elif process.returncode != 0:
            log = (folder / f"rank{rank}.log").read_text().strip().splitlines()
            problems.append(f"rank {rank} ended with status {process.returncode}: {' '.join(log[-3:])}")
    if problems:
        raise CheckFailed("; ".join(problems))
    figures: dict[str, Any] = json.loads((folder / "rank0.json").read_text())["figures"]
    return figures


def _be_a_rank(name: str, folder: str, arguments: str, rank: int) -> None:
    import mccl_core
    from mccl_core.selftest.programs import PROGRAMS

    outcome: dict[str, Any]
    try:
        mccl_core.require_backend()
        store = dist.FileStore(str(Path(folder, "store")), WORLD)
        limit = timedelta(seconds=_STORE_TIMEOUT_S)
        dist.init_process_group("mccl", store=store, rank=rank, world_size=WORLD, timeout=limit)
        outcome = {"figures": PROGRAMS[name](rank=rank, **json.loads(arguments))}
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        traceback.print_exc()
        outcome = {"error": f"{type(error).__name__}: {error}"}
    partial = Path(folder, f"rank{rank}.partial")
    partial.write_text(json.dumps(outcome))
    partial.rename(Path(folder, f"rank{rank}.json"))
    if "error" in outcome:
        os._exit(1)  # nobody waits for a device that may never answer


if __name__ == "__main__":
    _be_a_rank(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
