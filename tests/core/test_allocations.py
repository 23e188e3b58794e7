"""The engine's threads allocate nothing in steady work (tests/cpp/allocation_test.cpp)."""

from __future__ import annotations

import subprocess

import pytest
from support.cpp import build_program


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_steady_all_reduces_allocate_nothing_on_the_engines_threads() -> None:
    done = subprocess.run([build_program("allocation_test")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
