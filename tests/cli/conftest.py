"""Runs the real command, on jobs of the test's own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import Command
from typer.testing import CliRunner

from mccl_fleet.main import app


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """This process's environment without a fleet's settings, and with a home of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MCCL_", "RAY_"))}
    return {**kept, "HOME": str(tmp_path)}


@pytest.fixture
def start(tmp_path: Path, environ: dict[str, str]) -> Iterator[Callable[..., Command]]:
    """Starts commands in a folder of the test's; they have ended after it."""
    commands: list[Command] = []

    def begin(*arguments: str, **variables: str) -> Command:
        commands.append(Command(*arguments, cwd=tmp_path, environ={**environ, **variables}))
        return commands[-1]

    yield begin
    for command in commands:
        command.close()


@pytest.fixture
def write_job(tmp_path: Path) -> Callable[..., str]:
    """Writes a job file with these fields over a script; returns its path."""

    def write(script: str | Path, **fields: Any) -> str:
        if not isinstance(script, Path):
            (tmp_path / "script.py").write_text(script)
            script = Path("script.py")
        path = tmp_path / "job.yaml"
        # JSON is YAML too.
        path.write_text(json.dumps({"script": str(script), "storage": str(tmp_path / "runs"), **fields}))
        return str(path)

    return write


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the command in this process; whatever would start a fleet fails the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("MCCL_FLEET_ADDRESS", "MCCL_FLEET_PROFILE", "MCCL_SECRET", "MCCL_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)

    def started(*unused: object) -> None:
        raise AssertionError("a fleet was started")

    monkeypatch.setattr("mccl_ray.local_fleet.LocalFleet.__enter__", started)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])
