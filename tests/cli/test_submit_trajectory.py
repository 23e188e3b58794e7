"""A job that was submitted learns, step by step, what the same script learns under plain DDP over Gloo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Command
from support.digits import ARGUMENTS, DIGITS, STEPS, TORCHRUN, UNDER_DDP, logged

from mccl_ray import exitcodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_losses_of_a_submitted_job_equal_those_of_plain_ddp(
    start: Callable[..., Command], write_job: Callable[..., str], environ: dict[str, str], tmp_path: Path
) -> None:
    fleet, plain = tmp_path / "fleet", tmp_path / "plain"
    plain.mkdir()
    command = start("submit", write_job(DIGITS, args=[*ARGUMENTS, "--log-dir", str(fleet)], workers=2))
    assert command.finish() == exitcodes.OK, command.errors()

    wrapper = tmp_path / "under_ddp.py"
    wrapper.write_text(UNDER_DDP)
    arguments = [sys.executable, *TORCHRUN, wrapper, DIGITS, *ARGUMENTS, "--log-dir", plain]
    subprocess.run(arguments, cwd=plain, env={**environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=200)

    ours, theirs = logged(fleet, "train_loss"), logged(plain, "train_loss")
    assert len(ours) == STEPS
    assert ours == pytest.approx(theirs, abs=1e-6, rel=0)
