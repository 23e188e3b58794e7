"""Sums by NEON and by vDSP round as the portable loops do (tests/cpp/reduce_test.cpp)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "mccl_core" / "csrc"
SOURCES = [
    *sorted((CSRC / "reduce").glob("*.cpp")),
    CSRC / "base" / "error.cpp",
    ROOT / "tests" / "cpp" / "reduce_test.cpp",
]
FLAGS = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", *map(str, SOURCES)]


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("definitions", [[], ["-DMCCL_ACCELERATE"]], ids=["loops", "a double of vDSP"])
def test_on_this_machine(tmp_path: Path, definitions: list[str]) -> None:
    program = tmp_path / "reduce_test"
    run([os.environ.get("CXX", "c++"), *FLAGS, *definitions, "-o", str(program)])
    run([str(program)])


@pytest.mark.slow
def test_neon_on_an_emulated_arm64(tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        reason = "NEON is tested by an emulator: apt-get install g++-aarch64-linux-gnu qemu-user"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    program = tmp_path / "reduce_test"
    run([compiler, "-static", *FLAGS, "-o", str(program)])
    run([emulator, str(program)])
