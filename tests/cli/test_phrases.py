"""What a person reads: events in words, and the summary."""

from __future__ import annotations

from typing import Any

import pytest

from mccl_fleet.phrases import describe, nbytes_text, number, summary
from mccl_fleet.render import JsonRenderer

RESULT: dict[str, Any] = {
    "event": "result",
    "run": "digits-1",
    "status": "finished",
    "error": None,
    "metrics": {"val_loss": 0.0807, "val_acc": 0.975},
    "samples_per_s": 1977.3,
    "workers": [{"rank": 0, "host": "mac-1", "ip": "10.0.0.1"}, {"rank": 1, "host": "mac-2", "ip": "10.0.0.2"}],
    "bytes_all_reduced": 75_900_000,
    "all_reduces": 420,
    "checkpoint": "/runs/digits-1/checkpoint_1",
    "logs": "/runs/digits-1/logs",
    "restarts": 1,
    "duration_s": 27.2,
}


def test_the_summary_tells_all_that_a_run_was_for() -> None:
    assert summary(RESULT) == [
        "",
        "finished digits-1 in 27 s, 1 restart",
        "  val_acc      0.975",
        "  val_loss     0.0807",
        "  throughput   1,977 samples/s",
        "  workers      0 mac-1 (10.0.0.1), 1 mac-2 (10.0.0.2)",
        "  all-reduced  75.9 MB in 420 all-reduces a worker",
        "  checkpoint   /runs/digits-1/checkpoint_1",
        "  logs         /runs/digits-1/logs",
    ]


def test_the_summary_of_a_failure_is_its_cause_and_where_to_look() -> None:
    failed = {**RESULT, "status": "failed", "error": "rank 1 on mac-2 (10.0.0.2): script ended: exit code 1"}
    assert summary(failed)[0] == "failed: rank 1 on mac-2 (10.0.0.2): script ended: exit code 1"
    assert "/runs/digits-1/logs" in summary(failed)[-1]


def test_a_script_without_a_group_has_no_bytes_to_tell() -> None:
    lines = summary({**RESULT, "bytes_all_reduced": None, "all_reduces": None, "samples_per_s": None})
    assert "  throughput   not measured" in lines


def test_a_loss_is_told_with_time_rank_and_host() -> None:
    event = {
        "event": "worker_died",
        "time": 0.0,
        "rank": 1,
        "host": "mac-2",
        "ip": "10.0.0.2",
        "what": "script",
        "how": "killed by SIGKILL",
        "message": "",
    }
    [line] = describe(event)
    assert line.endswith("lost rank 1 on mac-2 (10.0.0.2): script ended: killed by SIGKILL")


def test_only_rank_0_tells_what_all_ranks_know() -> None:
    event = {"event": "validation", "rank": 1, "epoch": 0, "step": 5, "metrics": {"val_acc": 0.5}}
    assert describe(event) == []
    assert describe({**event, "rank": 0}) == ["epoch 0, step 5: val_acc 0.5"]


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (75_900_000, "75.9 MB"), (3.4e11, "340.0 GB")]
)
def test_bytes_have_decimal_units(nbytes: float, text: str) -> None:
    assert nbytes_text(nbytes) == text


def test_numbers_have_four_digits() -> None:
    assert [number(value) for value in (0.97222, 1977.3, 594.84)] == ["0.9722", "1,977", "594.8"]


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    JsonRenderer().show({"event": "step", "loss": float("nan"), "rates": [float("inf"), 1.0]})
    assert capsys.readouterr().out == '{"event": "step", "loss": null, "rates": [null, 1.0]}\n'
