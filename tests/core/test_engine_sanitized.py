"""The engine under the thread sanitizer, and under the address and undefined-behaviour sanitizers: ranks as threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.cpp import ADDRESS_SANITIZER, THREAD_SANITIZER, build_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=[THREAD_SANITIZER, ADDRESS_SANITIZER], ids=["thread", "address"])
def program(request: pytest.FixtureRequest) -> Path:
    """tests/cpp/engine_stress.cpp, built with a sanitizer."""
    return build_program("engine_stress", request.param)


@pytest.mark.parametrize("credit_nbytes", [1 << 20, 1 << 16], ids=["credit", "grants"])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_random_programs_are_exact_and_clean(program: Path, world: int, credit_nbytes: int) -> None:
    arguments = [str(world), "300", str(world), str(credit_nbytes)]
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stderr == ""
    assert "exact" in done.stdout


@pytest.fixture(scope="module")
def faulty() -> Path:
    """tests/cpp/engine_faults.cpp, built with the thread sanitizer."""
    return build_program("engine_faults", THREAD_SANITIZER)


# Two or three rounds of each fault. Most of the time somebody is silent or late.
@pytest.mark.parametrize(("world", "rounds"), [(3, 24), (5, 16)])
def test_faults_at_random_are_told_right_and_survived(faulty: Path, world: int, rounds: int) -> None:
    done = subprocess.run([faulty, str(world), str(rounds), "1"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stderr == ""
    assert "all as it should be" in done.stdout
