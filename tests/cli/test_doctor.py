"""`doctor`: what it would check, and what it refuses. The checks themselves: tests/core/test_selftest.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mccl_core import selftest
from mccl_core.selftest import runner
from mccl_fleet.main import app
from mccl_ray import exitcodes


@pytest.fixture
def run() -> Callable[..., Any]:
    """Runs `doctor` in this process."""
    return lambda *arguments: CliRunner().invoke(app, ["doctor", *map(str, arguments)])


@pytest.fixture
def two_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the check that needs no ranks, and one that fails."""

    def broken() -> dict[str, Any]:
        raise ValueError("2 + 2 = 5")

    chosen = [plan for plan in selftest.plans("cpu", quick=True) if plan.name in ("extension", "wait_60_s")]
    chosen.append(runner.Plan("arithmetic", "sums are right", broken))
    monkeypatch.setattr(runner, "plans", lambda device, *, quick: chosen)


def test_without_self_test_it_says_what_it_would_do(run) -> None:
    result = run()
    assert result.exit_code == exitcodes.OK
    for plan in selftest.plans("cpu", quick=False):
        assert plan.name in result.stdout
    assert "--self-test" in result.stdout


def test_a_failed_check_is_in_both_reports_and_in_the_status(run, two_checks, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = run("--self-test", "--device", "cpu", "--report", report)
    assert result.exit_code == exitcodes.FAILED
    statuses = {check["name"]: check["status"] for check in json.loads(report.read_text())["checks"]}
    assert statuses == {"extension": "passed", "wait_60_s": "not_run", "arithmetic": "failed"}
    assert "2 + 2 = 5" in report.with_suffix(".txt").read_text()
    assert "1 passed, 1 failed, 1 not run" in result.stdout


def test_json_is_the_report(run, two_checks) -> None:
    result = run("--self-test", "--device", "cpu", "--json")
    assert json.loads(result.stdout)["device"] == "cpu"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--self-test", "--device", "tpu"), "device: 'tpu' is none of auto, cpu, mps"),
        (("--self-test", "--report", "/nowhere/report.json"), "--report: there is no folder /nowhere"),
    ],
)
def test_bad_input_gets_one_message(run, arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == exitcodes.BAD_INPUT
    assert message in result.stderr
    assert "Traceback" not in result.output
