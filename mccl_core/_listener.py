"""The listening sockets of a process: one thread that lets dialers prove who they are, each by a deadline.

Strangers cannot hold it up. It never blocks on a connection; it keeps a bounded number of unproven ones, and under
pressure drops the oldest for the newest; who was dropped and is no stranger dials again. Where descriptors run out it
waits for some to be free.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mccl_core import _local_socket
from mccl_core._handshake import Handshake, HandshakeError, Hello, Verdict, accept
from mccl_core._rate_limited_log import RateLimitedLog

log = logging.getLogger("mccl")

_PORTS_TRIED = 1024
_BACKLOG = 1024
_MOST_GUESTS = 128
_GRACE_S = 0.05  # what a connection is given before a newer one may take its place: many round trips
_RETRY_S = 0.1  # until the next attempt where accept fails and nothing can be dropped
_ACCEPTS_PER_TURN = 32  # then those who are in are served again
_UNREAD_NBYTES = 4096
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
Admit = Callable[[Hello, socket.socket, Callable[[Verdict], None]], None]


@dataclass
class _Guest:
    """A connection that has not proved anything yet."""

    sock: socket.socket
    address: str
    handshake: Handshake
    wanted: int
    since: float
    data: bytes = b""


class Listener:
    """Accepts, authenticates and hands over connections.

    `admit(hello, socket, tell)` is called on the listener's thread for each dialer that proved to be who it says; it
    owns the socket from then on. With `local` it also listens on a Unix socket, for processes of this machine.
    """

    def __init__(
        self,
        *,
        address: str,
        port_base: int,
        timeout_s: float,
        me: bytes,
        secret_of: Callable[[bytes], bytes | None],
        admit: Admit,
        local: bool = False,
    ) -> None:
        self._address = address
        self._port_base = port_base
        self._timeout_s = timeout_s
        self._me = me
        self._secret_of = secret_of
        self._admit = admit
        self._local = local
        self._guests: dict[int, _Guest] = {}  # by descriptor; the oldest first
        self._stopping = False
        self._paused_until: float | None = None
        self._strangers = RateLimitedLog(log)
        self._troubles = RateLimitedLog(log)
        self.port = 0

    def start(self) -> None:
        """Binds the first free port from the base on and starts the thread.

        Raises:
            OSError: the address cannot be bound, or no port is free.
        """
        # Of the descriptors of a training script (macOS gives it 256) strangers get a quarter.
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_guests = _MOST_GUESTS if soft < 0 else max(8, min(_MOST_GUESTS, soft // 4))
        self._socket = _bind(self._address, self._port_base)
        self.port = self._socket.getsockname()[1]
        self._doors = [self._socket]
        if self._local:
            self._doors.append(_local_socket.bind(self._me, _BACKLOG))
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for door in self._doors:
            self._selector.register(door, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="mccl-listener", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and closes the port. Connections that were handed over stay."""
        self._stopping = True
        self._wake_write.send(b"x")
        self._thread.join()

    def close_descriptors_in_child(self) -> None:
        """In a forked child: closes the inherited descriptors; the thread does not exist there."""
        for sock in (
            *self._doors,
            self._wake_read,
            self._wake_write,
            *(g.sock for g in self._guests.values()),
        ):
            sock.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._stopping:
            doors = []
            for key, _ in self._selector.select(self._next_timeout()):
                if key.fileobj in self._doors:
                    doors.append(key.fileobj)  # those who are in come first
                elif key.fileobj is not self._wake_read and key.fd in self._guests:
                    self._serve(self._guests[key.fd])
            now = time.monotonic()
            while self._guests and (oldest := self._oldest()).since + self._timeout_s <= now:
                self._dismiss(oldest, "it did not finish the handshake in time")
            if self._paused_until is not None and self._paused_until <= now:
                self._open_doors()
            for door in doors:
                self._greet(door)
            self._strangers.flush()
            self._troubles.flush()
        self._close()

    def _close(self) -> None:
        for guest in list(self._guests.values()):
            self._forget(guest)
            guest.sock.close()
        for trouble in (self._strangers, self._troubles):
            trouble.flush(now=True)
        self._selector.close()
        _local_socket.remove(self._me)
        for sock in (*self._doors, self._wake_read, self._wake_write):
            sock.close()

    def _next_timeout(self) -> float | None:
        deadlines = [self._paused_until, self._strangers.due_at(), self._troubles.due_at()]
        if self._guests:
            deadlines.append(self._oldest().since + self._timeout_s)
        set_ones = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(set_ones) - time.monotonic()) if set_ones else None

    def _oldest(self) -> _Guest:
        return next(iter(self._guests.values()))

    def _greet(self, door: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if len(self._guests) >= self._most_guests and not self._make_room():
                return
            try:
                sock, address = door.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ECONNABORTED:  # it has gone again
                    continue
                self._troubles.warn(f"accept failed: {error.strerror}; peers that dial meanwhile wait")
                if error.errno in _OUT_OF_RESOURCES and self._make_room():
                    continue
                self._shut_doors(time.monotonic() + _RETRY_S)
                return
            sock.setblocking(False)
            handshake = accept(sock.send, me=self._me, secret_of=self._secret_of)
            where = str(address[0]) if address else "this machine"
            guest = _Guest(sock, where, handshake, next(handshake), time.monotonic())
            self._guests[sock.fileno()] = guest
            self._selector.register(sock, selectors.EVENT_READ)

    def _make_room(self) -> bool:
        """Drops the oldest guest that has had its grace; where there is none yet, shuts the doors until there is."""
        if not self._guests:
            return False
        oldest = self._oldest()
        if time.monotonic() < oldest.since + _GRACE_S:
            self._shut_doors(oldest.since + _GRACE_S)
            return False
        self._dismiss(oldest, "newer connections took its place")
        return True

    def _shut_doors(self, until: float) -> None:
        if self._paused_until is None:
            for door in self._doors:
                self._selector.unregister(door)
        self._paused_until = until

    def _open_doors(self) -> None:
        self._paused_until = None
        for door in self._doors:
            self._selector.register(door, selectors.EVENT_READ)

    def _serve(self, guest: _Guest) -> None:
        try:
            part = guest.sock.recv(guest.wanted - len(guest.data))
            if not part:
                self._dismiss(guest, "it closed the connection")
                return
            guest.data += part
            if len(guest.data) < guest.wanted:
                return
            data, guest.data = guest.data, b""
            guest.wanted = guest.handshake.send(data)
        except BlockingIOError:
            return
        except (HandshakeError, OSError) as error:
            # Bytes that nobody has read would turn the close into a reset, which can overtake the reason.
            with contextlib.suppress(OSError):
                guest.sock.recv(_UNREAD_NBYTES)
            self._dismiss(guest, str(error))
        except StopIteration as done:
            hello, tell = done.value
            self._forget(guest)
            try:
                self._admit(hello, guest.sock, tell)
            except Exception:  # one connection must not end the listener for all
                log.exception("mccl: the connection from %s failed", guest.address)
                guest.sock.close()

    def _forget(self, guest: _Guest) -> None:
        self._selector.unregister(guest.sock)
        del self._guests[guest.sock.fileno()]

    def _dismiss(self, guest: _Guest, reason: str) -> None:
        self._strangers.warn(f"dropped a connection from {guest.address}: {reason}")
        self._forget(guest)
        guest.sock.close()


def _bind(address: str, port_base: int) -> socket.socket:
    """A socket that listens on `address`, which may have a scope ("fe80::1%en0"), on the first free port."""
    family, _, _, _, (host, _, *rest) = socket.getaddrinfo(
        address, port_base, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_PASSIVE
    )[0]
    for port in range(port_base, min(port_base + _PORTS_TRIED, 65536)):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port, *rest))
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise OSError(
                error.errno,
                f"cannot listen on {address} (listen_addr, MCCL_LISTEN_ADDR): {error.strerror}; "
                "name an address of this machine",
            ) from error
        sock.setblocking(False)
        return sock
    raise OSError(f"no free port from {port_base} on ({_PORTS_TRIED} tried) on {address}; set another MCCL_PORT_BASE")
