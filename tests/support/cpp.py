"""Builds the C++ test programs, without torch; each configuration once a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAIN = ()
THREAD_SANITIZER = ("-DMCCL_SANITIZE=thread", "-DCMAKE_CXX_FLAGS_RELEASE=-O1")
ADDRESS_SANITIZER = ("-DMCCL_SANITIZE=address,undefined", "-DCMAKE_CXX_FLAGS_RELEASE=-O1")


def build_program(name: str, options: tuple[str, ...] = PLAIN) -> Path:
    """Builds tests/cpp's program `name` with CMake `options`; returns it. Skips where doctest is missing."""
    require_doctest()
    directory = _configured(options)
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


@cache
def _configured(options: tuple[str, ...]) -> Path:
    # Removed with the process: the builds hold nothing that a later run could use.
    directory = tempfile.TemporaryDirectory(prefix="mccl-cpp-")
    _kept.append(directory)
    switches = ["-DMCCL_BUILD_TORCH=OFF", "-DMCCL_BUILD_TESTS=ON", *options]
    subprocess.run([_cmake(), "-S", ROOT, "-B", directory.name, *switches], check=True)
    return Path(directory.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


def _cmake() -> str:
    return shutil.which("cmake", path=Path(sys.executable).parent) or "cmake"
