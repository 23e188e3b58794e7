"""Runs scripts as ranks: each a process of its own, started the way a fleet worker or a user starts them."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mccl_lightning.contract import Event, FleetEnvironment, decode

TIME_LIMIT_S = 90
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")


@dataclass
class Rank:
    """What became of one rank."""

    returncode: int
    output: str
    events: list[Event]

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def clean_environment() -> dict[str, str]:
    """This process's environment without any launcher's variables, and one thread a process."""
    kept = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES and not k.startswith("MCCL_")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a script and gives its path."""

    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def run_alone(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `python ARGUMENTS...` as a user does, with output as one text."""

    def run(*arguments: str | Path, environ: Mapping[str, str] | None = None) -> Any:
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=tmp_path,
            env={**clean_environment(), **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )

    return run


@pytest.fixture
def run_fleet(tmp_path: Path) -> Callable[..., list[Rank]]:
    """Runs `python ARGUMENTS...` on every rank with a fleet worker's variables, and reads their events."""

    def run(*arguments: str | Path, world_size: int, **fleet: Any) -> list[Rank]:
        port = free_port()
        workers = [
            _Worker(
                [sys.executable, *map(str, arguments)],
                tmp_path / f"rank{rank}",
                {"rank": rank, "world_size": world_size, "master_port": port, **fleet},
            )
            for rank in range(world_size)
        ]
        deadline = time.monotonic() + TIME_LIMIT_S
        return [worker.result(deadline) for worker in workers]

    return run


class _Worker:
    """One rank's process, its output in a file and its events read by a thread."""

    def __init__(self, command: list[str], directory: Path, fleet: dict[str, Any]) -> None:
        directory.mkdir(exist_ok=True)
        reader, writer = os.pipe()
        variables = FleetEnvironment(
            master_addr="127.0.0.1", node_rank=fleet["rank"], events_fd=writer, **fleet
        ).to_environ()
        self._output = directory / "output.txt"
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                env={**clean_environment(), **variables},
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
            )
        os.close(writer)
        self._lines: list[bytes] = []
        self._thread = threading.Thread(target=self._read, args=[reader])
        self._thread.start()

    def _read(self, reader: int) -> None:
        with open(reader, "rb") as pipe:
            self._lines += pipe

    def result(self, deadline: float) -> Rank:
        """Waits until the deadline; a rank that hangs is ended then, with its stacks in its output."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)  # faulthandler writes the threads' stacks
        finally:
            if self._process.poll() is None:
                self._end()
        self._thread.join()
        return Rank(self._process.returncode, self._output.read_text(), [decode(line) for line in self._lines])

    def _end(self) -> None:
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
