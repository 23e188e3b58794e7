"""A fleet on this machine: one Ray head without a CPU, and further Ray nodes that each play one Mac."""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mccl_ray import environ
from mccl_ray.process import guarded, kill_group, write_private

POOL_OF_LOCAL_MACS = "mac"
_OBJECT_STORE_NBYTES = 100_000_000
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_POLL_S = 0.05
_START_ATTEMPTS = 3
_STARTED = "Ray runtime started."


class FleetStartError(RuntimeError):
    """A Ray node of the local fleet did not start; the text holds the end of its log."""


@dataclass
class _Node:
    """One `ray start --block`, and the log by which it says that it is up."""

    name: str
    arguments: list[str]
    log: Path
    cleanup: Path | None
    attempts: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self, env: Mapping[str, str]) -> None:
        self.attempts += 1
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *self.arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                guarded(command, cleanup=self.cleanup, grace_s=_STOP_TIMEOUT_S),
                env=dict(env),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_up(self) -> bool:
        return _STARTED in self.log.read_text(encoding="utf-8", errors="replace")

    def has_failed(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def stop(self, deadline: float) -> None:
        """Waits for the node's end until `deadline`, then kills its process group."""
        if self.process is None:
            return
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            kill_group(self.process.pid)
            self.process.wait()


class LocalFleet:
    """Starts on entering, stops on leaving; also stops when this process is killed, thanks to the guard.

    On Linux each Mac has an address of its own (127.0.0.2, …) and so counts as a host; elsewhere they share
    one. All its files are in a private temporary directory, which is deleted. With a
    `dashboard_port` it takes jobs at `job_server`, as the head of a standing fleet does.
    """

    def __init__(self, macs: int, env: Mapping[str, str], *, dashboard_port: int | None = None) -> None:
        self._macs = macs
        self._dashboard_port = dashboard_port
        self.env = environ.for_ray(env)
        """The environment of the nodes; whoever connects to the fleet needs the same RAY_AUTH_* variables."""
        self._nodes: list[_Node] = []
        self._directory: Path | None = None

    def __enter__(self) -> LocalFleet:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        self.stop()

    def _start(self) -> None:
        # Ray's sockets live here, and a socket's path may have 103 bytes on macOS: no TMPDIR.
        self._directory = Path(tempfile.mkdtemp(prefix="mccl-", dir="/tmp"))
        # The nodes listen on every address of this machine: without a token anyone who reaches it runs code.
        token = self._directory / "token"
        write_private(token, secrets.token_hex(32).encode())
        self.env = environ.with_ray_token(self.env, token)
        port, client_port = free_ports(2)
        self.address = f"127.0.0.1:{port}"
        common = [
            "--num-gpus=0",
            f"--object-store-memory={_OBJECT_STORE_NBYTES}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--dashboard-agent-listen-port=0",
            "--include-log-monitor=false",
            "--disable-usage-stats",
        ]
        head = [
            "--head",
            "--node-ip-address=127.0.0.1",
            f"--port={port}",
            f"--ray-client-server-port={client_port}",
            "--num-cpus=0",
            *self._dashboard(),
            "--no-monitor",
            "--node-name=head",
            *common,
        ]
        self._bring_up([self._node("head", head)])
        self._bring_up([self._mac(index, common) for index in range(self._macs)])

    def _dashboard(self) -> list[str]:
        if self._dashboard_port is None:
            return ["--include-dashboard=false"]
        return ["--include-dashboard=true", f"--dashboard-port={self._dashboard_port}"]

    @property
    def job_server(self) -> str:
        """The address for `mccl-fleet --address`."""
        return f"127.0.0.1:{self._dashboard_port}"

    def _mac(self, index: int, common: list[str]) -> _Node:
        address = f"127.0.0.{index + 2}" if sys.platform == "linux" else "127.0.0.1"
        name = f"local-mac-{index + 1}"
        arguments = [
            f"--address={self.address}",
            f"--node-ip-address={address}",
            f"--node-name={name}",
            "--num-cpus=1",
            f'--resources={{"pool:{POOL_OF_LOCAL_MACS}":1}}',
            *common,
        ]
        return self._node(name, arguments)

    def _node(self, name: str, arguments: list[str]) -> _Node:
        assert self._directory is not None
        # Nodes that start at the same time in one directory take each other's socket names.
        directory = self._directory / str(len(self._nodes))
        directory.mkdir()
        arguments = [*arguments, f"--temp-dir={directory}"]
        node = _Node(name, arguments, self._directory / f"{name}.log", self._directory)
        self._nodes.append(node)
        return node

    def _bring_up(self, nodes: list[_Node]) -> None:
        """Starts `nodes` at the same time and waits until all are up; one that fails is started again."""
        for node in nodes:
            node.start(self.env)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not all(node.is_up() for node in nodes):
            for node in nodes:
                if node.has_failed() and not node.is_up():
                    if node.attempts >= _START_ATTEMPTS:
                        raise FleetStartError(f"{node.name} did not start: {_tail(node.log)}")
                    node.start(self.env)
            if time.monotonic() > deadline:
                raise FleetStartError(f"the local fleet was not up within {_START_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Ends every process of the fleet and deletes its files; does nothing the second time."""
        for node in self._nodes:
            if node.process is not None:
                node.process.terminate()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for node in reversed(self._nodes):
            node.stop(deadline)
        self._nodes = []
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def free_ports(count: int) -> list[int]:
    """Ports that are free now, all different."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
