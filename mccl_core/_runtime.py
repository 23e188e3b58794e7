"""The one engine of a process: its listener, its connections, its secrets."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from pydantic import SecretBytes
from torch.distributed import DistBackendError

from mccl_core import _handshake, _local_socket
from mccl_core._C import Engine
from mccl_core._handshake import HandshakeBroken, HandshakeError, Hello, Verdict, job_id
from mccl_core._listener import Listener
from mccl_core._metrics_server import MetricsServer
from mccl_core._network import NetworkChoice
from mccl_core.config import CoreConfig

log = logging.getLogger("mccl")

# One attempt to connect: a SYN that a full backlog has dropped goes out again after a second at the latest.
_ATTEMPT_S = 2.0
_FIRST_PAUSE_S = 0.02  # between two attempts; doubled each time
_LONGEST_PAUSE_S = 0.5
_REFUSALS = 3  # "connection refused" so often means that nobody listens: macOS also says it where the backlog is full


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
        self.network: NetworkChoice
        self._jobs: dict[bytes, SecretBytes] = {}  # by job_id
        self._peers: dict[bytes, Peer] = {}  # as the first group knew them
        self._dialling: set[tuple[bytes, int]] = set()
        self._met: Counter[tuple[bytes, int]] = Counter()  # how often connected: who has left is not waited for
        self._changed = threading.Condition()
        self._metrics_server: MetricsServer | None = None

    def start(self, network: NetworkChoice) -> None:
        """Starts to listen where `network` says.

        Raises:
            OSError: the address cannot be bound, or no port is free.
        """
        self._listener = Listener(
            address=network.address,
            port_base=self.config.port_base + self.config.local_rank,
            timeout_s=self.config.handshake_timeout_ms / 1000,
            me=self.process,
            secret_of=self._secret_of,
            admit=self._admit,
            local=self.config.transport == "auto",
        )
        self._listener.start()
        self.network = replace(network, port=self._listener.port)
        log.info("mccl: %s", self.network)

    @property
    def address(self) -> str:
        """The address that this process listens on, as others may use it: without a scope."""
        return self.network.address.partition("%")[0]

    def serve_metrics(self, text: Callable[[], str]) -> None:
        """Serves `text()` where MCCL_METRICS_PORT asks for it, once; each local rank has a port of its own.

        Raises:
            OSError: no port is free, or this process may not listen there; the text says what to do.
        """
        if self.config.metrics_port is not None and self._metrics_server is None:
            port = self.config.metrics_port + self.config.local_rank
            self._metrics_server = MetricsServer(self.address, port, text)

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
        self._jobs[job_id(job)] = SecretBytes(secret)

    def _secret_of(self, job: bytes) -> bytes | None:
        secret = self._jobs.get(job)
        return None if secret is None else secret.get_secret_value()

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
            met_before = self._met[peer.process, lane]
        try:
            self._dial(peer, job, lane, deadline, met_before)
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
            met = lambda: self._met[peer.process, lane] > 0  # noqa: E731
            if not self._changed.wait_for(met, max(0.0, deadline - time.monotonic())):
                raise self._did_not_connect(peer)

    def _did_not_connect(self, peer: Peer) -> DistBackendError:
        return DistBackendError(
            f"mccl: {peer} did not connect to {self.address}:{self.port} within {self.config.connect_timeout_ms} ms; "
            "check that it can reach that address (firewall, MCCL_LISTEN_ADDR) and see its log"
        )

    def _dial(self, peer: Peer, job: str, lane: int, deadline: float, met_before: int) -> None:
        """Tries until the deadline: a busy listener may drop a dialer, which then comes again.

        One that says that there is a connection already has made it, or is just doing so, or has not seen yet that an
        earlier one has ended: the same dialer then comes again, too.
        """
        pause_s = _FIRST_PAUSE_S
        refusals = 0
        while True:
            problem: Exception | None = None
            try:
                verdict, sock = self._attempt(peer, job, lane, deadline)
                if verdict is Verdict.ACCEPT:
                    with self._changed:
                        self._add(sock, peer.process, lane, peer.host)
                    return
                sock.close()
            except HandshakeBroken as error:
                problem = error
            except HandshakeError as error:
                raise DistBackendError(
                    f"mccl: {peer} refused the connection: {error}; give all ranks the same MCCL_SECRET or "
                    "MCCL_SECRET_FILE, and see that rank's log"
                ) from error
            except OSError as error:
                problem = error
                refusals += isinstance(error, ConnectionRefusedError)
            if refusals == _REFUSALS or time.monotonic() + pause_s >= deadline:
                if problem is None:
                    raise self._did_not_connect(peer)
                raise DistBackendError(
                    f"mccl: cannot connect to {peer}: {getattr(problem, 'strerror', None) or problem}; check that the "
                    "process is alive and that no firewall is between"
                ) from problem
            with self._changed:
                if self._changed.wait_for(lambda: self._met[peer.process, lane] > met_before, pause_s):
                    return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _attempt(self, peer: Peer, job: str, lane: int, deadline: float) -> tuple[Verdict, socket.socket]:
        """Connects and shakes hands once."""
        connect_s = max(0.001, min(_ATTEMPT_S, deadline - time.monotonic()))
        sock = _local_socket.connect(peer.process, connect_s) if self.config.transport == "auto" else None
        if sock is None:
            sock = socket.create_connection((self._reachable(peer.address), peer.port), timeout=connect_s)
        try:
            secret = self._secret_of(job_id(job))
            assert secret is not None
            timeout_s = min(self.config.handshake_timeout_ms / 1000, deadline - time.monotonic())
            verdict = _handshake.dial(
                sock, secret=secret, job=job, me=self.process, peer=peer.process, lane=lane, timeout_s=timeout_s
            )
        except BaseException:
            sock.close()
            raise
        return verdict, sock

    def _reachable(self, address: str) -> str:
        """A link-local IPv6 address means something on one interface only: on ours, the one that we listen on."""
        return f"{address}%{self.network.interface}" if address.lower().startswith("fe80:") else address

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
        self._met[process, lane] += 1
        self._changed.notify_all()


_runtime: Runtime | None = None
_abandoned: list[Runtime] = []
_lock = threading.Lock()


def current_runtime() -> Runtime | None:
    """The runtime of this process, or None before its first process group."""
    return _runtime


def get_runtime(config: CoreConfig, network: Callable[[], NetworkChoice]) -> Runtime:
    """Returns this process's runtime; the first call makes and starts it, listening where `network()` says.

    Raises:
        NetworkError: no address can be chosen.
        OSError: it cannot be listened on.
    """
    global _runtime
    with _lock:
        if _runtime is None:
            choice = network()
            runtime = Runtime(config)
            try:
                runtime.start(choice)
            except BaseException:
                runtime.engine.shutdown()
                raise
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
