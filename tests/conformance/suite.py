"""Runs tests of torch/testing/_internal/distributed/distributed_test.py, in a process of its own.

The ranks of each test are processes forked from this one, which has imported torch already. Results go to standard
output, one JSON object a line; what the suite prints goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .groups import NAMES, install
from .runner import not_run, read_skips


def main() -> None:
    """Entry point of `python -m tests.conformance.suite`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--mode", choices=list(NAMES), required=True)
    parser.add_argument("--subject", choices=["mccl", "gloo"], required=True)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("tests", nargs="*")
    arguments = parser.parse_args()

    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(prefix="mccl-conformance-") as directory:
        for folder in ("barrier", "test_dir"):
            (Path(directory) / folder).mkdir()
        # The suite reads these when it is imported.
        os.environ |= {
            "BACKEND": NAMES[arguments.mode],
            "WORLD_SIZE": str(arguments.world),
            "TEMP_DIR": directory,
            "TORCH_TEST_TIMEOUT": "60",
        }
        install(arguments.mode, arguments.subject)
        case = test_case(arguments.mode)
        without = not_run(read_skips(), arguments.mode) if arguments.subject == "mccl" else ()
        names = arguments.tests or [n for n in unittest.TestLoader().getTestCaseNames(case) if n not in without]
        for name in names[arguments.part :: arguments.parts]:
            result = Outcome(name)
            start = time.monotonic()
            case(name).run(result)
            line = {"test": name, "outcome": result.outcome, "text": result.text, "s": time.monotonic() - start}
            results.write(json.dumps(line) + "\n")


def test_case(mode: str) -> type[unittest.TestCase]:
    """The suite's tests as a class whose ranks are forked; with all_to_all on CPU tensors added."""
    import torch
    from torch.testing._internal.common_distributed import DistTestCases

    if mode == "backend":
        for feature in ("ddp", "subgroup", "plugin"):
            DistTestCases.backend_feature[feature].add(NAMES["backend"])
    from torch.testing._internal.distributed import distributed_test

    class Conformance(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    for name, method in all_to_all_tests():
        setattr(Conformance, name, method)
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    return Conformance


def all_to_all_tests() -> Iterator[tuple[str, Any]]:
    """The suite's helpers for all_to_all, which it calls for MPI and NCCL alone: 3 helpers × 3 groups × 2 dtypes."""
    import torch

    def test(helper: str, group: str, dtype: torch.dtype) -> Any:
        def method(self: Any) -> None:
            members, group_id, rank = getattr(self, f"_init_{group}_test")()
            getattr(self, f"_test_{helper}_helper")(members, group_id, rank, dtype=dtype)

        return method

    for helper in ("all_to_all", "all_to_all_single_equal_split", "all_to_all_single_unequal_split"):
        for group in ("global", "group", "full_group"):
            for dtype in (torch.float32, torch.complex64):
                yield f"test_cpu_{helper}_{group}_{str(dtype)[6:]}", test(helper, group, dtype)


class Outcome(unittest.TestResult):
    """Of one test: passed, failed or skipped, and the error or the reason."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.outcome = "passed"
        self.text = ""

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self.outcome, self.text = "skipped", reason

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self.outcome, self.text = "failed", self.errors[-1][1]

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self.outcome, self.text = "failed", self.failures[-1][1]


if __name__ == "__main__":
    main()
    sys.exit(0)
