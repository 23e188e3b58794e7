"""The hand-off between a device's stream and the engine (tests/cpp/handoff_*.cpp), over two streams.

One is simulated. The other is the Metal shim over a fake Metal (tests/cpp/fake_metal.cpp), so that of what runs on a
Mac only the calls of device/metal/calls_apple.cpp are left out.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.cpp import THREAD_SANITIZER, build_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WRONG_DATA = ("the engine read what no kernel had written", "the stream read what the engine had not written")
# What the program says of each broken rule.
MUTATIONS = {
    "O1": WRONG_DATA,
    "O2": WRONG_DATA,
    "O3": ("a call from another thread was taken",),
    "one-counter": WRONG_DATA,
    "early-reuse": WRONG_DATA,
    "no-hold": WRONG_DATA,
}


def run(program: Path, *arguments: str, buckets: int, mutation: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the program; `mutation` names the rule that it breaks."""
    environment = os.environ | {"MCCL_HANDOFF_BUCKETS": str(buckets), "MCCL_HANDOFF_MUTATION": mutation}
    command = [str(program), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)


PROGRAMS = ("handoff_test", "handoff_metal_test")


@pytest.fixture(scope="module", params=PROGRAMS)
def sanitized(request: pytest.FixtureRequest) -> Path:
    """The program under the thread sanitizer."""
    return build_program(request.param, THREAD_SANITIZER)


def test_rules_hold_under_the_thread_sanitizer(sanitized: Path) -> None:
    done = run(sanitized, buckets=100_000)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert done.stderr == ""


@pytest.mark.parametrize("program", PROGRAMS)
def test_rules_hold_at_full_speed(program: str) -> None:
    done = run(build_program(program), buckets=100_000)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_broken_rule_is_noticed(sanitized: Path, mutation: str) -> None:
    done = run(sanitized, "--test-case=stress: shared*", buckets=100_000, mutation=mutation)
    assert done.returncode != 0
    reports = (*MUTATIONS[mutation], "ThreadSanitizer: data race")
    assert any(report in done.stdout + done.stderr for report in reports), done.stdout[-5000:]
