"""`make macos`: the extension compiles and links for macOS arm64, and what would only fail on a Mac fails here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "mccl_core" / "csrc"
VERSION = "2.13.0"


def build(csrc: Path = CSRC) -> subprocess.CompletedProcess[str]:
    """Builds for one release of PyTorch; objects of unchanged sources are taken from the last build."""
    command = [sys.executable, "-m", "tools.macos", "--torch", VERSION, "--csrc", csrc]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


@pytest.fixture(scope="module", autouse=True)
def good() -> subprocess.CompletedProcess[str]:
    """The build of the sources as they are: without it a plant that fails would show nothing."""
    done = build()
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_sources_as_they_are_pass(good: subprocess.CompletedProcess[str]) -> None:
    assert f"torch {VERSION}: good" in good.stdout


SELECTOR = ("device/metal/calls_apple.cpp", '"encodeSignalEvent:value:"', '"encodeSignal:value:"')
CLASS = ("device/metal/calls_apple.cpp", '"MTLSharedEventListener"', '"MTLSharedEventsListener"')
VDSP_SYMBOL = ("reduce/accelerate.cpp", "vDSP_vaddD", "vDSP_vaddDouble")
PYTORCH_NAME = ("torch/mps.cpp", "getIMPSAllocator()", "getSharedMPSAllocator()")
PYTORCH_SYMBOL = (  # declared, but in no library of PyTorch's
    "torch/mps.cpp",
    "namespace mccl {",
    "namespace at::mps { IMPSAllocator* getSharedMPSAllocator(); }\nnamespace mccl {\n"
    "void* not_in_pytorch() { return at::mps::getSharedMPSAllocator(); }",
)
OVERRIDE = ("torch/work.hpp", "bool isSuccess() const override", "bool isSuccess(int) const override")
AVAILABILITY = (
    "reduce/accelerate.cpp",
    "namespace mccl {",
    "#include <charconv>\nnamespace mccl {\n"
    "double newer_than_macos_14(const char* a, const char* b) { double x = 0; std::from_chars(a, b, x); return x; }",
)


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        pytest.param(SELECTOR, "metal-cpp knows no method encodeSignal:value:", id="selector"),
        pytest.param(CLASS, "metal-cpp knows no class MTLSharedEventsListener", id="class"),
        pytest.param(VDSP_SYMBOL, "no library has _vDSP_vaddDouble", id="vDSP symbol"),
        pytest.param(PYTORCH_NAME, "no member named 'getSharedMPSAllocator'", id="PyTorch name"),
        pytest.param(PYTORCH_SYMBOL, "no library has __ZN2at3mps21getSharedMPSAllocatorEv", id="PyTorch symbol"),
        pytest.param(OVERRIDE, "marked 'override'", id="method override"),
        pytest.param(AVAILABILITY, "'from_chars' is unavailable: introduced in macOS", id="availability"),
    ],
)
def test_what_a_mac_would_not_take_fails(tmp_path: Path, plant: tuple[str, str, str], says: str) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    name, right, wrong = plant
    text = (csrc / name).read_text()
    assert right in text
    (csrc / name).write_text(text.replace(right, wrong))
    done = build(csrc)
    assert done.returncode != 0
    assert says in done.stderr, done.stderr[-3000:]
