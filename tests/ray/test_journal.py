"""What the driver remembers of a run's events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mccl_ray import events
from mccl_ray.journal import FAILED, FINISHED, Journal, describe_death

pytestmark = pytest.mark.timeout(60)

WORKERS = [{"rank": rank, "host": f"mac-{rank}", "ip": f"10.0.0.{rank}", "pid": 100 + rank} for rank in range(2)]


@pytest.fixture
def seen() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def journal(tmp_path: Path, seen: list[dict[str, Any]]) -> Journal:
    journal = Journal(tmp_path / "run", run="run", max_failures=3, emit=seen.append)
    journal.open()
    journal.record({"event": events.WORKERS, "attempt": 1, "workers": WORKERS})
    return journal


def finished(rank: int) -> dict[str, Any]:
    return {
        "event": "finished",
        "rank": rank,
        "step": 10,
        "epoch": 2,
        "metrics": {"val_acc": 0.9 + rank / 100},
        "samples_per_s": 100.0,
        "bytes_all_reduced": 4096,
        "all_reduces": 8,
    }


def died(rank: int, what: str, how: str) -> dict[str, Any]:
    return {
        "event": events.DIED,
        "rank": rank,
        "what": what,
        "how": how,
        "message": "",
        "ip": f"10.0.0.{rank}",
    }


def test_the_result_sums_rates_and_takes_metrics_from_rank_0(journal: Journal, tmp_path: Path) -> None:
    for rank in (1, 0):
        journal.record(finished(rank))
    result = journal.finish(error=None, checkpoint="c")
    assert result["status"] == FINISHED
    assert result["samples_per_s"] == 200.0
    assert result["metrics"] == {"val_acc": 0.9}
    assert (result["bytes_all_reduced"], result["all_reduces"]) == (4096, 8)
    assert result["workers"] == WORKERS
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result


def test_events_are_kept_with_the_workers_host_but_output_is_not(
    journal: Journal, tmp_path: Path, seen: list[dict[str, Any]]
) -> None:
    journal.record({"event": events.OUTPUT, "rank": 0, "text": "hello"})
    journal.record({**finished(1), "host": "as the machine calls itself"})
    journal.finish(error=None, checkpoint=None)
    kept = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in kept] == [events.WORKERS, "finished", events.RESULT]
    assert kept[1]["host"] == "mac-1"
    assert [event["event"] for event in seen] == [events.WORKERS, events.OUTPUT, "finished", events.RESULT]


def test_the_cause_is_the_lost_worker_not_those_who_lost_their_peer(journal: Journal) -> None:
    journal.record(died(0, "script", "exit code 1"))
    journal.record(died(1, "worker", "the Ray worker's process died"))
    assert journal.cause() == "rank 1 on mac-1 (10.0.0.1): the Ray worker's process died"


def test_a_killed_script_is_the_cause_of_one_that_gave_up(journal: Journal) -> None:
    journal.record(died(0, "script", "exit code 1"))
    journal.record(died(1, "script", "killed by SIGKILL"))
    assert journal.cause() == "rank 1 on mac-1 (10.0.0.1): script ended: killed by SIGKILL"


def test_among_equals_the_first_is_the_cause(journal: Journal) -> None:
    journal.record(died(1, "script", "exit code 2"))
    journal.record(died(0, "script", "exit code 1"))
    assert (journal.cause() or "").startswith("rank 1 on mac-1")


def test_a_restart_names_the_checkpoint_and_counts(journal: Journal, seen: list[dict[str, Any]]) -> None:
    journal.record({"event": "checkpoint", "rank": 0, "step": 7, "epoch": 1, "metrics": {}})
    journal.record(died(1, "script", "killed by SIGKILL"))
    journal.record({"event": events.RESTARTING})
    assert seen[-1]["checkpoint_step"] == 7
    assert (seen[-1]["failures"], seen[-1]["max_failures"]) == (1, 3)
    assert "rank 1" in seen[-1]["cause"]
    journal.record({"event": events.WORKERS, "attempt": 2, "workers": WORKERS})
    assert journal.cause() is None
    result = journal.finish(error="too bad", checkpoint=None)
    assert (result["status"], result["restarts"], result["error"]) == (FAILED, 1, "too bad")


def test_numbers_that_are_not_finite_do_not_spoil_the_sum(journal: Journal) -> None:
    journal.record({**finished(0), "samples_per_s": float("nan")})
    journal.record(finished(1))
    assert journal.finish(error=None, checkpoint=None)["samples_per_s"] == 100.0


def test_a_death_in_words_ends_with_its_message() -> None:
    event = {**died(1, "script", "exit code 1"), "host": "mac-1", "message": "ValueError: no"}
    assert describe_death(event) == "rank 1 on mac-1 (10.0.0.1): script ended: exit code 1: ValueError: no"


def test_a_line_of_output_is_never_taken_for_an_event() -> None:
    event = {"event": "step", "step": 1}
    assert events.from_line(events.to_line(event)) == event
    for line in ("hello", '{"event": "step"}', "@mccl-fleet {", "@mccl-fleet 3"):
        assert events.from_line(line) is None
