"""The one engine of a process: its listener, its connections, its secrets."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import DistBackendError

from mccl_core import _handshake, _local_socket
from mccl_core._C import Engine
from mccl_core._handshake import HandshakeError, Hello, Verdict
from mccl_core._listener import Listener
from mccl_core._metrics_server import MetricsServer
from mccl_core.config import CoreConfig

log = logging.getLogger("mccl")


@dataclass(frozen=True)
class Peer:
    """A process that a rank of some group runs in."""

    rank: int
    process: bytes
    host: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ({self.address}:{self.port})"


class Runtime:
    """Connections to other processes, each made once and shared by all groups."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.process = secrets.token_bytes(16)
        self.engine = Engine(config.engine_options())
        self.address = ""
        self._jobs: dict[str, bytes] = {}
        self._peers: dict[bytes, Peer] = {}  # as the first group knew them
        self._dialling: set[tuple[bytes, int]] = set()
        self._met: set[tuple[bytes, int]] = set()  # connected now, or once: who has left again is not waited for
        self._changed = threading.Condition()
        self._metrics_server: MetricsServer | None = None

    def start(self, address: str) -> None:
        """Starts to listen on `address` (MCCL_LISTEN_ADDR wins)."""
        self.address = self.config.listen_addr or address
        self._listener = Listener(
            address=self.address,
            port_base=self.config.port_base,
            timeout_s=self.config.handshake_timeout_ms / 1000,
            me=self.process,
            secret_of=self._jobs.get,
            admit=self._admit,
            local=self.config.transport == "auto",
        )
        self._listener.start()

    def serve_metrics(self, text: Callable[[], str]) -> None:
        """Serves `text()` where MCCL_METRICS_PORT asks for it, once.

        Raises:
            OSError: no port is free, or this process may not listen there; the text says what to do.
        """
        if self.config.metrics_port is not None and self._metrics_server is None:
            self._metrics_server = MetricsServer(self.address, self.config.metrics_port, text)

    @property
    def port(self) -> int:
        """The port that this process listens on."""
        return self._listener.port

    def stop(self) -> None:
        """Says goodbye to all peers and ends the threads."""
        if self._metrics_server is not None:
            self._metrics_server.stop()
        self._listener.stop()
        self.engine.shutdown()

    def abandon_in_child(self) -> None:
        """In a forked child: closes what was inherited, so that the parent's death stays visible to its peers."""
        self.engine.close_descriptors_in_child()
        self._listener.close_descriptors_in_child()
        if self._metrics_server is not None:
            self._metrics_server.close_descriptors_in_child()

    def trust(self, job: str, secret: bytes) -> None:
        """From now on processes of this job are let in."""
        self._jobs[job] = secret

    def know(self, peer: Peer) -> None:
        """Remembers how a process and its machine are called, for errors and metrics."""
        self._peers.setdefault(peer.process, peer)

    def name_of(self, process: bytes) -> str:
        """How metrics call a process: `rank 1 on mac-2`, by its rank in the first group."""
        peer = self._peers.get(process)
        return f"rank {peer.rank} on {peer.host}" if peer else "a process of no group"

    def dial(self, peer: Peer, job: str, lane: int) -> None:
        """Connects to `peer` on `lane` unless that is done already. Blocks, up to connect_timeout_ms.

        Raises:
            DistBackendError: it cannot be reached, or is not who it should be; the text names rank, host and remedy.
        """
        deadline = time.monotonic() + self.config.connect_timeout_ms / 1000
        with self._changed:
            self._changed.wait_for(lambda: (peer.process, lane) not in self._dialling, deadline - time.monotonic())
            if self.engine.connected(peer.process, lane):
                return
            self._dialling.add((peer.process, lane))
        try:
            self._dial(peer, job, lane, deadline)
        finally:
            with self._changed:
                self._dialling.discard((peer.process, lane))
                self._changed.notify_all()

    def await_connection(self, peer: Peer, lane: int, deadline: float) -> None:
        """Blocks until `peer` has connected to this process on `lane`, even if it has left again since.

        Raises:
            DistBackendError: it did not by the deadline (of time.monotonic()).
        """
        with self._changed:
            met = lambda: (peer.process, lane) in self._met  # noqa: E731
            if not self._changed.wait_for(met, max(0.0, deadline - time.monotonic())):
                raise DistBackendError(
                    f"mccl: {peer} did not connect to {self.address}:{self.port} within "
                    f"{self.config.connect_timeout_ms} ms; check that it can reach that address (firewall, "
                    "MCCL_LISTEN_ADDR) and see its log"
                )

    def _dial(self, peer: Peer, job: str, lane: int, deadline: float) -> None:
        timeout = max(0.001, deadline - time.monotonic())
        try:
            sock = _local_socket.connect(peer.process, timeout) if self.config.transport == "auto" else None
            if sock is None:
                sock = socket.create_connection((peer.address, peer.port), timeout=timeout)
            try:
                verdict = _handshake.dial(
                    sock, secret=self._jobs[job], job=job, me=self.process, peer=peer.process, lane=lane
                )
            except BaseException:
                sock.close()
                raise
        except HandshakeError as error:
            raise DistBackendError(
                f"mccl: {peer} refused the connection: {error}; give all ranks the same MCCL_SECRET or MCCL_SECRET_FILE"
            ) from error
        except OSError as error:
            raise DistBackendError(
                f"mccl: cannot connect to {peer}: {error.strerror or error}; check that the process is alive and that "
                "no firewall is between"
            ) from error
        if verdict is Verdict.ACCEPT:
            with self._changed:
                self._add(sock, peer.process, lane, peer.host)
            return
        # The other process has connected to us, or is just doing so; that connection is the one that stays.
        sock.close()
        self.await_connection(peer, lane, deadline)

    def _admit(self, hello: Hello, sock: socket.socket, tell: Callable[[Verdict], None]) -> None:
        with self._changed:
            process, lane = hello.dialer, hello.lane
            if self.engine.connected(process, lane):
                verdict = Verdict.DUPLICATE
            elif (process, lane) in self._dialling and self.process < process:
                verdict = Verdict.BUSY
            else:
                verdict = Verdict.ACCEPT
            try:
                tell(verdict)
            except OSError as error:
                log.info("mccl: a peer left during the handshake: %s", error)
                sock.close()
                return
            if verdict is not Verdict.ACCEPT:
                sock.close()
                return
            self._add(sock, process, lane, self._peers[process].host if process in self._peers else "an unknown host")

    def _add(self, sock: socket.socket, process: bytes, lane: int, host: str) -> None:
        self.engine.add_connection(sock.detach(), process, lane, host)
        self._met.add((process, lane))
        self._changed.notify_all()


_runtime: Runtime | None = None
_abandoned: list[Runtime] = []
_lock = threading.Lock()


def current_runtime() -> Runtime | None:
    """The runtime of this process, or None before its first process group."""
    return _runtime


def get_runtime(config: CoreConfig, address: Callable[[], str]) -> Runtime:
    """Returns this process's runtime; the first call makes and starts it, listening on `address()`."""
    global _runtime
    with _lock:
        if _runtime is None:
            runtime = Runtime(config)
            runtime.start(address())
            atexit.register(_stop)
            _runtime = runtime
        return _runtime


def _stop() -> None:
    global _runtime
    runtime, _runtime = _runtime, None
    if runtime is not None:
        runtime.stop()


def _after_fork() -> None:
    global _runtime, _lock
    _lock = threading.Lock()
    runtime, _runtime = _runtime, None
    if runtime is not None:
        # Its threads do not exist here: it is kept and never used, so that nobody waits for them.
        _abandoned.append(runtime)
        atexit.unregister(_stop)
        runtime.abandon_in_child()


os.register_at_fork(after_in_child=_after_fork)
