"""Builds the C++ test programs, without torch, in build/tests: one folder for each configuration."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAIN = ()
THREAD_SANITIZER = ("-DMCCL_SANITIZE=thread", "-DCMAKE_CXX_FLAGS_RELEASE=-O1")
ADDRESS_SANITIZER = ("-DMCCL_SANITIZE=address,undefined", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", "-DMCCL_BUILD_FUZZERS=ON")


def build_program(name: str, options: tuple[str, ...] = PLAIN) -> Path:
    """Builds a program of tests/cpp, tests/fuzz or benchmarks with CMake `options`. Skips where doctest is missing."""
    require_doctest()
    with _configured(options) as directory:
        subprocess.run([_cmake(), "--build", directory, "--parallel", "2", "--target", name], check=True)
        return directory / name


@cache
def require_doctest() -> None:
    """Skips the test where doctest's headers are not installed; on CI that is an error."""
    probe = [os.environ.get("CXX", "c++"), "-E", "-x", "c++", "-include", "doctest/doctest.h", os.devnull]
    if subprocess.run(probe, capture_output=True).returncode == 0:
        return
    reason = "the C++ tests need doctest: apt-get install doctest-dev, or brew install doctest"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextlib.contextmanager
def _configured(options: tuple[str, ...]) -> Iterator[Path]:
    """The folder of a configuration's build, to which nobody else builds meanwhile."""
    name = hashlib.sha256("\0".join((str(ROOT), *options)).encode()).hexdigest()[:12]
    directory = ROOT / "build" / "tests" / name
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        switches = ["-DMCCL_BUILD_TORCH=OFF", "-DMCCL_BUILD_TESTS=ON", "-DMCCL_BUILD_BENCHMARKS=ON", *options]
        subprocess.run([_cmake(), "-S", ROOT, "-B", directory, *switches], check=True)
        yield directory


def _cmake() -> str:
    return shutil.which("cmake", path=Path(sys.executable).parent) or "cmake"
