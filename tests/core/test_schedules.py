"""Every schedule is proved symbolically, and every planted fault is found (tests/cpp/schedule_test.cpp)."""

from __future__ import annotations

import subprocess

import pytest
from support.cpp import build_program


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_schedule_is_right_and_every_planted_fault_is_found() -> None:
    done = subprocess.run([build_program("schedule_test")], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-5000:]
