"""The commands against a head that was started separately and outlives them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mccl_core import links
from mccl_fleet.main import app
from mccl_ray import exitcodes
from mccl_ray.local_fleet import LocalFleet, free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """A head with two Macs; yields the address of its job server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MCCL_", "RAY_"))}
    kept["RAY_AUTH_MODE"] = "disabled"  # Ray reads a process's token once, and this process may have none
    # The head runs drivers with the `python` of its PATH.
    kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    with LocalFleet(2, kept, dashboard_port=free_ports(1)[0]) as fleet:
        yield fleet.job_server


@pytest.fixture
def run(head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Runs a command with --json, expects a status, and returns what it printed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MCCL_FLEET_ADDRESS", head)

    def command(*arguments: str, status: int = exitcodes.OK) -> list[dict[str, Any]]:
        result = CliRunner().invoke(app, [*arguments, "--json"])
        assert result.exit_code == status, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]

    return command


HELLO = "import os\nprint('hello from', os.environ['RANK'], os.getcwd())\n"


def test_a_job_runs_in_the_folder_that_was_sent(run, write_job, tmp_path: Path) -> None:
    (tmp_path / "mccl_core").mkdir()  # as in a checkout: it must not shadow the installed package
    (tmp_path / "mccl_core" / "__init__.py").write_text("raise ImportError('the uploaded one')\n")
    events = run("submit", write_job(HELLO, workers=2))
    result = events[-1]
    assert (result["event"], result["status"]) == ("result", "finished")
    assert sorted(worker["host"] for worker in result["workers"]) == ["local-mac-1", "local-mac-2"]
    line = next(event["text"] for event in events if event["event"] == "output")
    assert line.startswith("hello from 0 ")
    assert str(tmp_path) not in line
    job = events[0]["job"]

    [status] = run("status", job)
    assert (status["status"], status["workers"]) == ("succeeded", 2)
    assert job in [described["job"] for described in run("status")]
    assert line in [entry["text"] for entry in run("logs", job)]
    [entry] = run("logs", job, "--rank", "1")
    assert entry["text"].startswith("hello from 1 ")
    assert run("cancel", job) == [{"job": job, "cancelled": False}]


def test_a_running_job_can_be_cancelled(run, write_job) -> None:
    [submitted] = run("submit", write_job("import time\ntime.sleep(600)\n", workers=1), "--no-follow")
    job = submitted["job"]
    assert run("cancel", job) == [{"job": job, "cancelled": True}]


def test_a_failing_script_fails_the_command(run, write_job) -> None:
    job = write_job("import sys\nsys.exit('no such data set')\n", max_failures=0)
    result = run("submit", job, status=exitcodes.FAILED)[-1]
    assert "rank 0 on local-mac-" in result["error"]
    assert "no such data set" in result["error"]


def test_more_workers_than_macs_says_how_many_there_are(run, write_job) -> None:
    result = run("submit", write_job(HELLO, workers=5), status=exitcodes.NOT_ENOUGH_MACS)[-1]
    assert "5 workers" in result["error"]
    assert "2 Macs (local-mac-1, local-mac-2)" in result["error"]


def test_the_head_and_its_macs_are_listed(run) -> None:
    nodes = run("nodes")
    assert [(node["name"], node["role"]) for node in nodes] == [
        ("head", "head"),
        ("local-mac-1", "mac"),
        ("local-mac-2", "mac"),
    ]
    assert nodes[1]["pools"] == ["mac"]


def test_an_unknown_job_is_named(run) -> None:
    assert run("status", "nothing", status=exitcodes.NO_HEAD) == []


def test_all_macs_of_the_fleet_are_tuned(run, tmp_path: Path) -> None:
    file = tmp_path / "link.yaml"
    storage = str(tmp_path / "runs")
    [told] = run("tune", "--output", str(file), "--seconds", "0.02", "--storage", storage)
    assert told["profile"] == links.load(str(file)).model_dump()
    assert "# 2 ranks on local-mac-" in file.read_text()


def test_a_script_outside_the_folder_is_refused(run, write_job, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    run("submit", write_job(HELLO, workdir="code"), status=exitcodes.BAD_INPUT)


def test_a_folder_that_is_too_large_is_refused(run, write_job, tmp_path: Path) -> None:
    with (tmp_path / "data.bin").open("wb") as file:
        file.write(os.urandom(1 << 20) * 110)
    run("submit", write_job(HELLO), status=exitcodes.BAD_INPUT)
