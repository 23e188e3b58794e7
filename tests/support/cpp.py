"""Builds the C++ test programs, without torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build_program(name: str, directory: Path, *options: str) -> Path:
    """Builds tests/cpp/<name>.cpp with CMake `options` in `directory`; returns the program."""
    cmake = shutil.which("cmake", path=Path(sys.executable).parent) or "cmake"
    switches = ["-DMCCL_BUILD_TORCH=OFF", "-DMCCL_BUILD_TESTS=ON", *options]
    subprocess.run([cmake, "-S", ROOT, "-B", directory, *switches], check=True)
    subprocess.run([cmake, "--build", directory, "--parallel", "2", "--target", name], check=True)
    return directory / name
