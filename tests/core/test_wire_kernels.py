"""Wire kernels, the choice of the largest elements and the pool (tests/cpp/wire_test.cpp), also under a sanitizer."""

from __future__ import annotations

import subprocess

import pytest
from support.cpp import ADDRESS_SANITIZER, PLAIN, build_program


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [PLAIN, ADDRESS_SANITIZER], ids=["plain", "address"])
def test_they_are_exact(options: tuple[str, ...]) -> None:
    done = subprocess.run([build_program("wire_test", options)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
