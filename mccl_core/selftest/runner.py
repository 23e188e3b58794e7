"""Which checks there are, what each needs, and how they are run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import torch

from mccl_core.selftest import machine
from mccl_core.selftest.local_ranks import CheckFailed, run_program
from mccl_core.selftest.report import Check, Report, Status

Device = Literal["cpu", "mps"]
MIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    """A check before it is run: `run` returns the figures or raises."""

    name: str
    claim: str
    run: Callable[[], dict[str, Any]]
    needs_mps: bool = False


def run(device: str = "auto", *, quick: bool = False, report: Callable[[str], None] = print) -> Report:
    """Runs every check that this machine can run; blocks for minutes, and on a Mac about two more for long waits.

    Args:
        device: "cpu", "mps", or "auto": the Apple GPU where torch can use one.
        quick: smaller sizes and counts, for a first look.
        report: called with one line a check.

    Raises:
        ValueError: `device` is no such name, or is not available here.
    """
    available = torch.backends.mps.is_available()
    if device not in ("auto", "cpu", "mps"):
        raise ValueError(f"device: {device!r} is none of auto, cpu, mps")
    if device == "mps" and not available:
        raise ValueError("device: 'mps' is not available to torch on this machine; use 'cpu' or 'auto'")
    where: Device = "mps" if device == "mps" or (device == "auto" and available) else "cpu"
    checks = []
    for plan in plans(where, quick=quick):
        check = _run_one(plan, where)
        report(f"{check.name}: {check.status.replace('_', ' ')}{f', {check.reason}' if check.reason else ''}")
        checks.append(check)
    created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Report(created=created, device=where, quick=quick, machine=machine.describe(), checks=checks)


def plans(device: Device, *, quick: bool) -> list[Plan]:
    """All checks in the order in which they run, also those that this machine cannot run."""

    def ranks(program: str, timeout_s: float = 120, **arguments: Any) -> Callable[[], dict[str, Any]]:
        return lambda: run_program(program, timeout_s=timeout_s, device=device, **arguments)

    waits = [
        Plan(
            f"wait_{late_s}_s",
            f"a command buffer that waits {late_s} s for a late rank is neither killed nor released early",
            ranks("late_peer", timeout_s=120 + late_s, late_s=late_s),
            needs_mps=True,
        )
        for late_s in (1, 10, 60)
    ]
    return [
        Plan("extension", "the compiled core loads, and was built for this torch", _extension),
        Plan(
            "unified_storage",
            "the CPU reads and writes an MPS tensor's own memory",
            ranks("unified_storage"),
            needs_mps=True,
        ),
        *(
            Plan(
                f"simulated_device_{name}",
                f"kernels that run late and all-reduces keep their order, in {name} memory",
                ranks("simulated_device", op_count=200, private_memory=name == "private"),
            )
            for name in ("shared", "private")
        ),
        Plan("sums", "two ranks' sums of every type equal float64's to half a unit", ranks("sums", count=100_003)),
        *waits,
        Plan(
            "late_device",
            "an all-reduce of a tensor that the GPU is still to write waits for the kernels, and the CPU does not",
            ranks("late_device", busy_s=2),
            needs_mps=True,
        ),
        Plan(
            "bursts",
            "asynchronous all-reduces without a synchronization of the host are exact",
            ranks("bursts", op_count=160 if quick else 640),
        ),
        Plan(
            "trajectories",
            "two ranks that never look at the loss train to the same bits, and to one process's weights",
            ranks("trajectories", step_count=20 if quick else 100),
        ),
        Plan(
            "allocator_reuse",
            "memory is not reused while an all-reduce is in flight",
            ranks("allocator_reuse", round_count=64 if quick else 512),
        ),
        Plan(
            "overlap",
            "all-reduces run while the device computes (measured, not judged: two ranks share this machine)",
            ranks(
                "overlap",
                timeout_s=300,
                bucket_count=4 if quick else 18,
                bucket_nbytes=(4 if quick else 25) * 1_000_000,
                compute_ratio=1.5,
            ),
        ),
    ]


def _run_one(plan: Plan, device: Device) -> Check:
    if plan.needs_mps and device != "mps":
        reason = "needs tensors on an Apple GPU (mps)"
        return Check(name=plan.name, claim=plan.claim, status="not_run", reason=reason, seconds=0)
    status: Status = "passed"
    reason, figures = "", {}
    started_s = time.monotonic()
    try:
        figures = plan.run()
    except (CheckFailed, ImportError, RuntimeError, ValueError) as error:
        status, reason = "failed", str(error)
    seconds = time.monotonic() - started_s
    return Check(name=plan.name, claim=plan.claim, status=status, reason=reason, seconds=seconds, figures=figures)


def _extension() -> dict[str, Any]:
    try:
        from mccl_core import _C
    except ImportError as error:
        raise ImportError(
            f"{error}; build it: `make setup` in a checkout, or install the wheel of this torch"
        ) from error
    return {"file": str(_C.__file__).rpartition("/")[2]}
