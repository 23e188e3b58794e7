"""Runs the real command, and finds every process that it has started, by a mark in their environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "mccl_fleet.main"]
MARK = "TEST_MARK_OF_MCCL"
POLL_S = 0.05


def processes_with(mark: str) -> dict[int, str]:
    """The living processes whose environment holds the mark, and their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended meanwhile, or is a zombie
            continue
    return found


class Command:
    """A running `mccl-fleet … --json`, whose events are read as they come."""

    def __init__(self, *arguments: str, cwd: Path, environ: dict[str, str]) -> None:
        self.mark = uuid.uuid4().hex
        self.events: list[dict[str, Any]] = []
        self._errors = (cwd / f"stderr-{self.mark}").open("w+")
        self.process = subprocess.Popen(
            [*COMMAND, *arguments, "--json"],
            cwd=cwd,
            env={**environ, MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def until(self, kind: str, *, count: int = 1) -> dict[str, Any]:
        """Reads events up to the `count`-th of this kind from here on, and returns that."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            event["read_at"] = time.time()
            self.events.append(event)
            if event["event"] == kind:
                count -= 1
                if count == 0:
                    return event
        raise AssertionError(f"ended before {kind}: {self.events[-5:]} {self.errors()}")

    def finish(self) -> int:
        """Reads all remaining events and returns the exit status."""
        assert self.process.stdout is not None
        self.events += [json.loads(line) for line in self.process.stdout]
        return self.process.wait()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def living(self) -> dict[int, str]:
        return processes_with(self.mark)

    def assert_nothing_left(self, timeout_s: float = 10) -> None:
        """Fails unless every process that the command has started ends in time."""
        deadline = time.monotonic() + timeout_s
        while left := self.living():
            names = [line.strip()[:200] for line in left.values()]
            assert time.monotonic() < deadline, f"{len(names)} processes are left: {names}"
            time.sleep(POLL_S)

    def close(self) -> None:
        """Ends whatever a failed test left."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)
        self._errors.close()
