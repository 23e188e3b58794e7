"""A short fuzzing of what a peer's bytes meet first: the corpus, then twenty seconds of mutations (see campaign.py)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support.cpp import ADDRESS_SANITIZER, build_program

from fuzz.campaign import CORPUS, LIMITS, PROGRAMS

COMPILER = ("-DCMAKE_CXX_COMPILER=clang++",) if shutil.which("clang++") else ()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_input_is_a_finding(name: str, tmp_path: Path) -> None:
    program = build_program(name, (*ADDRESS_SANITIZER, *COMPILER))
    command = [program, "-max_total_time=20", *LIMITS, tmp_path, CORPUS / name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "Done " in done.stderr
