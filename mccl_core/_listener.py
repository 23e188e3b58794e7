"""The listening socket of a process: one thread that lets dialers prove who they are, each by a deadline."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mccl_core import _local_socket
from mccl_core._handshake import Handshake, HandshakeError, Hello, Verdict, accept

log = logging.getLogger("mccl")

_PORTS_TRIED = 1024
_BACKLOG = 1024
Admit = Callable[[Hello, socket.socket, Callable[[Verdict], None]], None]


@dataclass
class _Guest:
    """A connection that has not proved anything yet."""

    sock: socket.socket
    address: str
    handshake: Handshake
    wanted: int
    deadline: float
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
        secret_of: Callable[[str], bytes | None],
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
        self._guests: dict[int, _Guest] = {}
        self._stopping = False
        self.port = 0

    def start(self) -> None:
        """Binds the first free port from the base on and starts the thread.

        Raises:
            OSError: the address cannot be bound, or no port is free.
        """
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
            for key, _ in self._selector.select(self._next_timeout()):
                if key.fileobj in self._doors:
                    self._greet(key.fileobj)
                elif key.fileobj is not self._wake_read and key.fd in self._guests:
                    guest = self._guests[key.fd]
                    try:
                        self._serve(guest)
                    except Exception:  # one guest, whatever it sent, must not end the listener for all
                        log.exception("mccl: the connection from %s failed", guest.address)
                        self._dismiss(guest, "see above")
            now = time.monotonic()
            for guest in [g for g in self._guests.values() if g.deadline <= now]:
                self._dismiss(guest, "did not finish the handshake in time")
        for guest in list(self._guests.values()):
            self._dismiss(guest, "shutting down")
        self._selector.close()
        _local_socket.remove(self._me)
        for sock in (*self._doors, self._wake_read, self._wake_write):
            sock.close()

    def _next_timeout(self) -> float | None:
        if not self._guests:
            return None
        return max(0.0, min(g.deadline for g in self._guests.values()) - time.monotonic())

    def _greet(self, door: socket.socket) -> None:
        try:
            sock, address = door.accept()
        except OSError as error:  # the stranger has gone again, or descriptors ran out
            log.warning("mccl: accept failed: %s", error)
            return
        sock.setblocking(False)
        handshake = accept(sock.send, me=self._me, secret_of=self._secret_of)
        where = str(address[0]) if address else "this machine"
        guest = _Guest(sock, where, handshake, next(handshake), time.monotonic() + self._timeout_s)
        self._guests[sock.fileno()] = guest
        self._selector.register(sock, selectors.EVENT_READ)

    def _serve(self, guest: _Guest) -> None:
        try:
            part = guest.sock.recv(guest.wanted - len(guest.data))
            if not part:
                self._dismiss(guest, "closed the connection")
                return
            guest.data += part
            if len(guest.data) < guest.wanted:
                return
            data, guest.data = guest.data, b""
            guest.wanted = guest.handshake.send(data)
        except BlockingIOError:
            return
        except (HandshakeError, OSError) as error:
            self._dismiss(guest, str(error))
        except StopIteration as done:
            hello, tell = done.value
            self._forget(guest)
            self._admit(hello, guest.sock, tell)

    def _forget(self, guest: _Guest) -> None:
        self._selector.unregister(guest.sock)
        del self._guests[guest.sock.fileno()]

    def _dismiss(self, guest: _Guest, reason: str) -> None:
        log.info("mccl: dropped a connection from %s: %s", guest.address, reason)
        if self._guests.get(guest.sock.fileno()) is guest:
            self._forget(guest)
        guest.sock.close()


def _bind(address: str, port_base: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in range(port_base, min(port_base + _PORTS_TRIED, 65536)):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno in (98, 48):  # EADDRINUSE on Linux and macOS
                continue
            raise OSError(
                error.errno,
                f"cannot listen on {address} (listen_addr, MCCL_LISTEN_ADDR): {error.strerror}; "
                "name an address of this machine",
            ) from error
        sock.setblocking(False)
        return sock
    raise OSError(f"no free port from {port_base} on ({_PORTS_TRIED} tried) on {address}; set another MCCL_PORT_BASE")
