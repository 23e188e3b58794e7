"""Who is let in: the handshake's two sides against each other and against strangers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import pytest

from mccl_core._handshake import HandshakeError, Hello, Verdict, dial
from mccl_core._listener import Listener

SECRET = b"0123456789abcdef"
DIALER, ACCEPTOR = b"d" * 16, b"a" * 16


@pytest.fixture
def listener():
    """A listener that admits members of the job "job", and the list of those that it has admitted."""
    admitted: list[bytes] = []

    def admit(hello: Hello, sock: socket.socket, tell: Callable[[Verdict], None]) -> None:
        admitted.append(hello.dialer)
        tell(Verdict.ACCEPT)
        sock.close()

    server = Listener(
        address="127.0.0.1",
        port_base=29600,
        timeout_s=0.5,
        me=ACCEPTOR,
        secret_of={"job": SECRET}.get,
        admit=admit,
    )
    server.start()
    yield server, admitted
    server.stop()


def connect(server: Listener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=5)


def test_both_sides_prove_that_they_know_the_secret(listener) -> None:
    server, admitted = listener
    with connect(server) as sock:
        assert dial(sock, secret=SECRET, job="job", me=DIALER, peer=ACCEPTOR) is Verdict.ACCEPT
    assert admitted == [DIALER]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"secret": b"another secret 00"}, "another job secret"),
        ({"job": "other"}, "unknown job or process"),
        ({"peer": b"x" * 16}, "unknown job or process"),
    ],
)
def test_a_wrong_dialer_is_refused(listener, changed: dict[str, object], message: str) -> None:
    server, admitted = listener
    arguments = {"secret": SECRET, "job": "job", "me": DIALER, "peer": ACCEPTOR} | changed
    with connect(server) as sock, pytest.raises(HandshakeError, match=message):
        dial(sock, **arguments)
    assert admitted == []


def test_an_acceptor_without_the_secret_is_found_out() -> None:
    impostor = Listener(
        address="127.0.0.1",
        port_base=29700,
        timeout_s=5,
        me=ACCEPTOR,
        secret_of={"job": b"guessed secret 00"}.get,
        admit=lambda *_: None,
    )
    impostor.start()
    try:
        with connect(impostor) as sock, pytest.raises(HandshakeError, match="another job secret"):
            dial(sock, secret=SECRET, job="job", me=DIALER, peer=ACCEPTOR)
    finally:
        impostor.stop()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x05hello",
        b"\xff" * 64,
        b"\0\0\x10\0" + b"[" * 4096,
        b"\x00\x00\x00\x02{}",
        b"\x00",
    ],
)
def test_strangers_are_dropped_and_members_still_get_in(listener, garbage: bytes) -> None:
    server, admitted = listener
    with connect(server) as stranger:
        stranger.sendall(garbage)
        with connect(server) as sock:
            assert dial(sock, secret=SECRET, job="job", me=DIALER, peer=ACCEPTOR) is Verdict.ACCEPT
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):  # what it sent was not read to the end
            while stranger.recv(4096):  # an error message, perhaps; then the end
                pass
    assert admitted == [DIALER]


def test_a_replayed_proof_does_not_open_the_door(listener) -> None:
    server, admitted = listener
    recorded: list[bytes] = []

    class Recorder(socket.socket):
        def sendall(self, data: bytes, *args: object) -> None:
            recorded.append(data)
            super().sendall(data)

    with Recorder() as sock:
        sock.settimeout(5)
        sock.connect(("127.0.0.1", server.port))
        dial(sock, secret=SECRET, job="job", me=DIALER, peer=ACCEPTOR)
    with connect(server) as replay:
        for message in recorded:
            replay.sendall(message)
        answer = b""
        while part := replay.recv(4096):
            answer += part
    assert b"wrong job secret" in answer
    assert admitted == [DIALER]


def test_a_silent_connection_costs_nobody_else_time(listener) -> None:
    server, _ = listener
    silent = [connect(server) for _ in range(50)]
    start = time.monotonic()
    with connect(server) as sock:
        dial(sock, secret=SECRET, job="job", me=DIALER, peer=ACCEPTOR)
    assert time.monotonic() - start < 5
    for sock in silent:
        sock.settimeout(10)
        assert sock.recv(1) == b""  # dropped by the deadline
        sock.close()


def test_two_listeners_take_two_ports(listener) -> None:
    server, _ = listener
    other = Listener(
        address="127.0.0.1",
        port_base=server.port,
        timeout_s=1,
        me=b"o" * 16,
        secret_of=lambda _: None,
        admit=lambda *_: None,
    )
    other.start()
    assert other.port > server.port
    thread_names = [t.name for t in threading.enumerate()]
    assert thread_names.count("mccl-listener") == 2
    other.stop()


def test_an_address_of_another_machine_is_a_clear_error() -> None:
    elsewhere = Listener(
        address="192.0.2.1",
        port_base=29600,
        timeout_s=1,
        me=ACCEPTOR,
        secret_of=lambda _: None,
        admit=lambda *_: None,
    )
    with pytest.raises(OSError, match="MCCL_LISTEN_ADDR"):
        elsewhere.start()
