"""`mccl-fleet doctor`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mccl_fleet.options import Json, fail, one_message
from mccl_ray import exitcodes


def doctor(
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Run the checks; without it only say what would run.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the JSON report goes; the text goes beside it, as .txt."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, mps, or auto: mps where torch can use an Apple GPU.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes and counts.")] = False,
    as_json: Json = False,
) -> None:
    """Checks that training works on this machine: two ranks, their sums, their order, their overlap with compute."""
    if report is not None and not report.absolute().parent.is_dir():
        raise fail(f"--report: there is no folder {report.absolute().parent}", exitcodes.BAD_INPUT)
    from mccl_core import selftest  # imports torch, which other commands do not wait for

    with one_message():
        if not self_test:
            for plan in selftest.plans("cpu", quick=quick):
                print(f"{plan.name}: {plan.claim}{' (needs an Apple GPU)' if plan.needs_mps else ''}")
            print("Run them with: mccl-fleet doctor --self-test --report report.json")
            return
        result = selftest.run(device, quick=quick, report=_say)
    if report is not None:
        report.write_text(result.to_json())
        report.with_suffix(".txt").write_text(result.to_text())
    print(result.to_json() if as_json else result.to_text(), end="")
    if result.failed:
        raise typer.Exit(exitcodes.FAILED)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
