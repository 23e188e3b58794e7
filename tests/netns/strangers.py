"""A host full of strangers: a process in it that keeps many connections to other hosts' ports, of all bad kinds."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import resource
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from mccl_core._handshake import VERSION, Hello, job_id
from netns.host import Host

_HELLO = Hello(job_id("given"), b"s" * 16, b"a" * 16, 0, b"n" * 16).encode()
# What a connection says first; None closes it at once. The last one goes on with a byte a second.
_OPENINGS: tuple[bytes | None, ...] = (
    b"",
    None,
    b"GET / HTTP/1.1\r\n\r\n",
    bytes(2000),
    _HELLO,
    _HELLO[:4] + bytes([VERSION + 1]) + _HELLO[5:],
    _HELLO[:1],
)


class Strangers:
    """`count` connections in all from `host` to `targets` (address and port), while `storming` is set.

    With `again` those that were dropped, or that nobody accepted, are opened anew at once; otherwise each storm opens
    each connection once.
    """

    def __init__(self, host: Host, targets: Sequence[tuple[str, int]], *, count: int = 1000, again: bool) -> None:
        context = multiprocessing.get_context("fork")
        self.storming = context.Event()
        self.dialled = context.Value("q", 0)
        self.opened = context.Value("q", 0)  # those that somebody listened to
        arguments = (host, targets, count, again, self.storming, self.dialled, self.opened)
        self._process = context.Process(target=_run, args=arguments, daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()

    @contextlib.contextmanager
    def storm(self) -> Iterator[None]:
        """Storms while the context lasts."""
        self.storming.set()
        try:
            yield
        finally:
            self.storming.clear()


@dataclass
class _Stranger:
    """What one connection is about."""

    opening: bytes | None
    connected: bool = False
    sent: int = 1
    """Bytes of the hello that a slow one has sent."""
    sent_at: float = 0.0


def _run(host: Host, targets: Sequence[tuple[str, int]], count: int, again: bool, storming, dialled, opened) -> None:  # type: ignore[no-untyped-def]
    host.enter()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 200), hard))
    while True:
        storming.wait()
        with selectors.DefaultSelector() as selector:
            number = 0
            while storming.is_set():
                while len(selector.get_map()) < count and (again or number < count) and storming.is_set():
                    _dial(targets[number % len(targets)], _OPENINGS[number % len(_OPENINGS)], selector)
                    number += 1
                    dialled.value += 1
                    if number % 100 == 0:  # those that were dropped make room
                        opened.value += _serve(selector, 0)
                opened.value += _serve(selector, 0.1)
                _trickle(selector)
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]


def _dial(target: tuple[str, int], opening: bytes | None, selector: selectors.BaseSelector) -> None:
    """Does not wait for the answer: behind a full link it takes long, and the others are to come meanwhile."""
    sock = socket.socket()
    sock.setblocking(False)
    if sock.connect_ex(target) not in (0, errno.EINPROGRESS):
        sock.close()
        return
    selector.register(sock, selectors.EVENT_WRITE, data=_Stranger(opening))


def _serve(selector: selectors.BaseSelector, timeout_s: float) -> int:
    """Sends the openings of those that are connected now, and returns their number; forgets those that have ended."""
    opened = 0
    for key, _ in selector.select(timeout_s):
        sock, stranger = key.fileobj, key.data
        assert isinstance(sock, socket.socket)
        try:
            if stranger.connected:
                over = not sock.recv(4096)
            else:
                refused = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
                opened += not refused
                over = refused or stranger.opening is None
                if not over:
                    sock.send(stranger.opening)
                    stranger.connected, stranger.sent_at = True, time.monotonic()
                    selector.modify(sock, selectors.EVENT_READ, stranger)
        except OSError:
            over = True
        if over:
            selector.unregister(sock)
            sock.close()
    return opened


def _trickle(selector: selectors.BaseSelector) -> None:
    """A byte more of the hello, a second after the last, on the slow ones."""
    now = time.monotonic()
    for key in list(selector.get_map().values()):
        stranger = key.data
        if stranger.connected and stranger.opening == _HELLO[:1] and now >= stranger.sent_at + 1:
            with contextlib.suppress(OSError):
                key.fileobj.send(_HELLO[stranger.sent : stranger.sent + 1])  # type: ignore[union-attr]
            stranger.sent, stranger.sent_at = stranger.sent + 1, now
