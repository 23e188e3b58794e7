"""`tune`: a real fleet of this machine measures its link."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.commands import Command

from mccl_core import links
from mccl_ray import exitcodes


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_local_fleet_writes_a_profile_that_loads_and_is_used(
    start: Callable[..., Command], tmp_path: Path, environ: dict[str, str]
) -> None:
    command = start("tune", "--output", "link.yaml", "--workers", "2", "--seconds", "0.02")
    assert command.process.stdout is not None
    lines = list(command.process.stdout)
    assert command.process.wait() == exitcodes.OK, command.errors()
    [told] = map(json.loads, lines)
    file = tmp_path / "link.yaml"
    profile = links.load(str(file))
    assert told == {"output": "link.yaml", "profile": profile.model_dump()}
    head = file.read_text().splitlines()[:2]
    assert "mccl-fleet tune --output link.yaml --workers 2" in head[0]
    assert "2 ranks on local-mac-" in head[1]
    command.assert_nothing_left()
    planned = subprocess.run(
        [sys.executable, "-m", "mccl_fleet.main", "plan", "--workers", "2", "--size", "1MiB", "--json"],
        env={**environ, "MCCL_LINK_PROFILE": str(file)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert json.loads(planned.stdout)["link_profile"] == profile.model_dump()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_job_that_fails_leaves_no_file(start: Callable[..., Command], tmp_path: Path) -> None:
    command = start("tune", "--output", "link.yaml", "--seconds", "0.02", MCCL_LINK_PROFILE="nowhere.yaml")
    assert command.finish() == exitcodes.FAILED
    assert "nowhere.yaml" in command.errors()
    assert not (tmp_path / "link.yaml").exists()
    command.assert_nothing_left()


@pytest.fixture
def run(run_here: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `tune` in this process."""
    return partial(run_here, "tune")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--output", "no/folder/link.yaml"], exitcodes.BAD_INPUT, "--output: 'no/folder/link.yaml'"),
        (["--output", "l", "--workers", "3"], exitcodes.NOT_ENOUGH_MACS, "--local-macs 3"),
        (["--output", "l", "--address", "127.0.0.1:9"], exitcodes.NO_HEAD, "no head at http://127.0.0.1:9"),
    ],
)
def test_what_cannot_be_measured_is_told_at_once(run, arguments: list[str], status: int, message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == status, result.output
    assert message in result.stderr
    assert "Traceback" not in result.stderr
