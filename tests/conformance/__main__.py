"""`python -m tests.conformance --world 3 --mode impersonate`: runs, compares with Gloo, exits with 1 on any problem."""

from __future__ import annotations

import argparse
import sys
import time

from . import runner
from .groups import NAMES


def main() -> int:
    """Parses the arguments, runs each world and mode, prints a line for each and every problem."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=main.__doc__)
    parser.add_argument("--world", type=int, action="append", help="ranks; may be given again (default: 3, 4 and 8)")
    parser.add_argument("--mode", choices=list(NAMES), action="append", help="default: both")
    parser.add_argument("--parts", type=int, default=runner.PARTS, help="tests that run at a time")
    parser.add_argument("--record-gloo", action="store_true", help="run Gloo instead and write what it passes")
    parser.add_argument("tests", nargs="*", help="names of tests; default: all")
    arguments = parser.parse_args()
    skips = runner.read_skips()
    bad = 0
    for mode in arguments.mode or list(NAMES):
        for world in arguments.world or [3, 4, 8]:
            start = time.monotonic()
            if arguments.record_gloo:
                runner.record_reference(world, mode)
                continue
            results = runner.run_suite(world, mode, "mccl", arguments.tests, arguments.parts)
            took_s = time.monotonic() - start
            gloo, source = runner.reference(world, mode)
            if arguments.tests:
                gloo = [name for name in gloo if name in arguments.tests]
            found = runner.problems(results, gloo, skips, mode)
            counts = runner.summary(results)
            print(
                f"{mode}, {world} ranks: {counts['passed']} passed, {counts['failed']} failed, "
                f"{counts['skipped']} skipped, {took_s:.0f} s; Gloo ({source}) passes {len(gloo)}"
            )
            for problem in found:
                print("  " + problem)
            bad += len(found)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
