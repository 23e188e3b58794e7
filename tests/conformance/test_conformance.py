"""PyTorch's own distributed_test.py against this backend, under both names, with three and four ranks.

`make conformance` runs eight ranks, too. docs/torch-distributed.md says how it works.
"""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from .groups import NAMES, Mode
from .runner import Result, Results, Skip, passed, problems, read_skips, reason_for, reference, run_suite

# What of the suite runs, of which 18 are the helpers of all_to_all: fewer would mean that tests have vanished.
EXPECTED = {("impersonate", 3): 108, ("impersonate", 4): 111, ("backend", 3): 83, ("backend", 4): 84}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mode", "world"), list(EXPECTED))
def test_pytorchs_own_suite(mode: Mode, world: int) -> None:
    results = run_suite(world, mode, "mccl")
    gloo, _ = reference(world, mode)
    found = problems(results, gloo, read_skips(), mode)
    assert not found, "\n".join(found)
    assert len(passed(results)) >= EXPECTED[mode, world]
    assert sum("all_to_all" in name for name in passed(results)) >= 18


def result(outcome: str, text: str = "") -> Result:
    return Result(outcome, text, 0.1)


def test_what_counts_as_a_problem() -> None:
    skips = [Skip("needs a GPU", re.compile(r"Need \d GPUs"), frozenset(), None, True)]
    results: Results = {
        "good": result("passed"),
        "bad": result("failed", "Traceback\nValueError: broken"),
        "excused": result("skipped", "Need 2 GPUs"),
        "unexplained": result("skipped", "no idea"),
        "shy": result("skipped", "Need 1 GPUs"),
    }
    assert problems(results, ["good", "shy", "gone"], skips, "backend") == [
        "bad failed: ValueError: broken",
        "unexplained is skipped (no idea), and skips.toml gives no reason",
        "gone is missing, and Gloo passes it",
        "shy is skipped, and Gloo passes it",
    ]


def test_a_reason_holds_in_its_mode_alone() -> None:
    skips = [Skip("by name", None, frozenset({"a"}), "backend", True)]
    assert reason_for("a", "whatever", skips, "backend") == "by name"
    assert reason_for("a", "whatever", skips, "impersonate") is None


def test_every_skip_has_a_reason_and_says_what_it_is_about() -> None:
    for skip in read_skips():
        assert len(skip.reason) > 20 and (skip.message or skip.tests)
        assert skip.mode in (None, *NAMES)
    assert max(Counter(skip.reason for skip in read_skips()).values()) == 1


def test_gloos_record_is_complete() -> None:
    from .runner import REFERENCE

    for modes in json.loads(REFERENCE.read_text()).values():
        for mode, worlds in modes.items():
            assert mode in NAMES and set(worlds) == {"3", "4", "8"}
