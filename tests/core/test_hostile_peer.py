"""What an authenticated peer that breaks the rules can do (tests/cpp/hostile_peer_test.cpp)."""

from __future__ import annotations

import subprocess

import pytest
from support.cpp import PLAIN, THREAD_SANITIZER, build_program


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [PLAIN, THREAD_SANITIZER], ids=["plain", "thread"])
def test_it_gets_an_error_that_names_it_and_little_memory(options: tuple[str, ...]) -> None:
    program = build_program("hostile_peer_test", options)
    done = subprocess.run([program], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
