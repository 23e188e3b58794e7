"""The self-test runs here on the CPU, and says of everything else that it was not run."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import torch

from mccl_core import selftest
from mccl_core.selftest import local_ranks, programs
from mccl_core.selftest.report import Check, Report, json_schema
from mccl_core.selftest.runner import plans

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "docs" / "self-test.schema.json"


def test_the_schema_in_docs_is_that_of_the_report() -> None:
    remedy = "python -c 'from mccl_core.selftest.report import json_schema; print(json_schema(), end=\"\")'"
    assert SCHEMA.read_text() == json_schema(), f"write it anew: {remedy} > {SCHEMA.relative_to(ROOT)}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_that_a_cpu_can_show_passes() -> None:
    lines: list[str] = []
    report = selftest.run("cpu", quick=True, report=lines.append)
    jsonschema.validate(json.loads(report.to_json()), json.loads(SCHEMA.read_text()))
    assert not report.failed, report.to_text()
    assert len(lines) == len(report.checks)
    statuses = {check.name: check.status for check in report.checks}
    for plan in plans("cpu", quick=True):
        assert statuses[plan.name] == ("not_run" if plan.needs_mps else "passed")
        assert plan.name in report.to_text()
    assert all(check.reason for check in report.checks if check.status == "not_run")


@pytest.mark.slow
def test_a_program_that_raises_fails_its_check() -> None:
    with pytest.raises(local_ranks.CheckFailed, match=r"rank 0: TypeError: .*no_such_argument"):
        local_ranks.run_program("sums", timeout_s=60, no_such_argument=1)


@pytest.mark.slow
def test_a_rank_that_hangs_fails_its_check_and_is_ended() -> None:
    with pytest.raises(local_ranks.CheckFailed, match=r"rank [01] did not end within 1 s"):
        local_ranks.run_program("late_peer", timeout_s=1, device="cpu", late_s=600)


def test_a_wrong_result_is_an_error() -> None:
    programs.require(True, "fine")
    with pytest.raises(ValueError, match="wrong sum"):
        programs.require(False, "wrong sum")


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has an Apple GPU")
def test_mps_is_refused_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="'mps' is not available"):
        selftest.run("mps")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="'tpu' is none of auto, cpu, mps"):
        selftest.run("tpu")


def test_a_report_names_what_failed() -> None:
    failed = Check(name="sums", claim="sums are right", status="failed", reason="2 + 2 = 5", seconds=1)
    example = Report.model_validate(
        {
            "created": "2026-01-31T12:00:00Z",
            "device": "cpu",
            "quick": True,
            "machine": {
                "system": "macOS 26.1",
                "processor": "Apple M4 Max",
                "core_count": 16,
                "memory_nbytes": 64 << 30,
                "python": "3.12.1",
                "torch": "2.13.0",
                "mccl_fleet": "0.1.0",
                "mps_available": True,
            },
            "checks": [failed],
        }
    )
    assert example.failed == [failed]
    assert "FAILED" in example.to_text()
    assert "2 + 2 = 5" in example.to_text()
    assert "0 passed, 1 failed, 0 not run" in example.to_text()
