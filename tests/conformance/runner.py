"""Runs the suite in several processes at a time, and judges what came out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .groups import NAMES, Mode, Subject

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SKIPS = HERE / "skips.toml"
REFERENCE = HERE / "gloo.json"
# Each test waits more than it computes: for its ranks to start, and for the suite's own barrier, which polls.
PARTS = 3
SUITE_LIMIT_S = 900


@dataclass(frozen=True)
class Result:
    """How one test ended: `passed`, `failed` or `skipped`; the error or the suite's reason; seconds."""

    outcome: str
    text: str
    seconds: float


Results = dict[str, Result]


@dataclass(frozen=True)
class Skip:
    """A written reason for tests that do not run: those named, or those that the suite skips with such a message."""

    reason: str
    message: re.Pattern[str] | None
    tests: frozenset[str]
    mode: Mode | None  # None: both
    run: bool  # False: not even started


def read_skips() -> list[Skip]:
    """The list of tests/conformance/skips.toml."""
    entries = tomllib.loads(SKIPS.read_text())["skip"]
    return [
        Skip(
            reason=entry["reason"],
            message=re.compile(entry["message"]) if "message" in entry else None,
            tests=frozenset(entry.get("tests", ())),
            mode=entry.get("mode"),
            run=entry.get("run", True),
        )
        for entry in entries
    ]


def run_suite(world: int, mode: Mode, subject: Subject, tests: Sequence[str] = (), parts: int = PARTS) -> Results:
    """Runs the suite, or some tests of it, with `world` ranks.

    Raises:
        RuntimeError: a process of the suite itself ended early; the text holds what it printed last.
    """
    command = [sys.executable, "-m", "tests.conformance.suite", "--mode", mode, "--subject", subject]
    command += ["--world", str(world), "--parts", str(parts)]
    # The suite says much on standard error: it goes to a file.
    with tempfile.TemporaryDirectory(prefix="mccl-conformance-") as directory:
        logs = [Path(directory) / str(part) for part in range(parts)]
        outputs = [Path(directory) / f"{part}.jsonl" for part in range(parts)]
        processes = []
        for part in range(parts):
            arguments = [*command, "--part", str(part), *tests]
            with logs[part].open("w") as log, outputs[part].open("w") as output:
                process = subprocess.Popen(
                    arguments, cwd=ROOT, stdout=output, stderr=log, env=_environment(), start_new_session=True
                )
                processes.append(process)
        try:
            for part, process in enumerate(processes):
                if process.wait(SUITE_LIMIT_S) != 0:
                    raise RuntimeError(
                        f"a process of the suite ended with {process.returncode}: {logs[part].read_text()[-3000:]}"
                    )
            return {name: result for output in outputs for name, result in _read(output)}
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, 9)
                    process.wait()


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "MCCL_LOG_LEVEL": "error",
        "PYTHONFAULTHANDLER": "1",
    }


def _read(output: Path) -> Iterable[tuple[str, Result]]:
    for line in output.read_text().splitlines():
        entry = json.loads(line)
        yield entry["test"], Result(entry["outcome"], entry["text"], entry["s"])


def passed(results: Results) -> list[str]:
    """The names of the tests that passed."""
    return sorted(name for name, result in results.items() if result.outcome == "passed")


def reference(world: int, mode: Mode) -> tuple[list[str], str]:
    """What Gloo passes in this mode, and where that is from: the recorded list, or a run of it for other torches."""
    recorded = json.loads(REFERENCE.read_text()) if REFERENCE.exists() else {}
    version = _torch_version()
    names = recorded.get(version, {}).get(mode, {}).get(str(world))
    if names is not None:
        return names, "recorded"
    return passed(run_suite(world, mode, "gloo")), "run now"


def record_reference(world: int, mode: Mode) -> None:
    """Runs Gloo and writes what it passes to gloo.json."""
    recorded: dict[str, Any] = json.loads(REFERENCE.read_text()) if REFERENCE.exists() else {}
    names = passed(run_suite(world, mode, "gloo"))
    recorded.setdefault(_torch_version(), {}).setdefault(mode, {})[str(world)] = names
    REFERENCE.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


def _torch_version() -> str:
    return str(torch.__version__).split("+")[0]


def problems(results: Results, gloo_passes: Iterable[str], skips: Sequence[Skip], mode: Mode) -> list[str]:
    """What must not be: a failure, a test that Gloo passes and mccl does not, a skip without a written reason."""
    found = []
    excused = {name for skip in skips if not skip.run and skip.mode in (None, mode) for name in skip.tests}
    for name, result in sorted(results.items()):
        if result.outcome == "failed":
            found.append(f"{name} failed: {_last_error(result.text)}")
        if result.outcome == "skipped" and reason_for(name, result.text, skips, mode) is None:
            found.append(f"{name} is skipped ({result.text}), and skips.toml gives no reason")
    for name in sorted(set(gloo_passes) - excused):
        outcome = results[name].outcome if name in results else "missing"
        if outcome not in ("passed", "failed"):
            found.append(f"{name} is {outcome}, and Gloo passes it")
    return found


def reason_for(name: str, message: str, skips: Sequence[Skip], mode: Mode) -> str | None:
    """The written reason for a test that the suite skips with this message; None where there is none."""
    for skip in skips:
        fits = name in skip.tests or (skip.message is not None and skip.message.fullmatch(message))
        if fits and skip.mode in (None, mode):
            return skip.reason
    return None


def _last_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if re.match(r"\s*[\w.]*(Error|Exception)\b", line)]
    return lines[-1] if lines else text[-300:]


def not_run(skips: Sequence[Skip], mode: Mode) -> frozenset[str]:
    """The tests that are not even started."""
    return frozenset(name for skip in skips if not skip.run and skip.mode in (None, mode) for name in skip.tests)


def summary(results: Results) -> Counter[str]:
    """Tests by outcome."""
    return Counter(result.outcome for result in results.values())


__all__ = ["NAMES", "Result", "Results", "Skip", "problems", "read_skips", "record_reference", "reference", "run_suite"]
