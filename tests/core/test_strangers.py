"""Strangers at the listener's door: whatever they do, a member gets in within a second and nothing grows."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mccl_core._handshake import HandshakeBroken, HandshakeError, Hello, Verdict, dial, job_id
from mccl_core._listener import Listener
from mccl_core._rate_limited_log import RateLimitedLog

SECRET = b"0123456789abcdef"
DIALER, ACCEPTOR = b"d" * 16, b"a" * 16


class Door:
    """A listener that admits members of the job "job", and those that it has admitted."""

    def __init__(self, *, timeout_s: float = 2.0, address: str = "127.0.0.1") -> None:
        self.admitted: list[bytes] = []
        self.listener = Listener(
            address=address,
            port_base=29600,
            timeout_s=timeout_s,
            me=ACCEPTOR,
            secret_of={job_id("job"): SECRET}.get,
            admit=self._admit,
        )
        self.listener.start()
        self.address = address

    def _admit(self, hello: Hello, sock: socket.socket, tell: Callable[[Verdict], None]) -> None:
        self.admitted.append(hello.dialer)
        tell(Verdict.ACCEPT)
        sock.close()

    def connect(self) -> socket.socket:
        return socket.create_connection((self.address, self.listener.port), timeout=10)

    def let_member_in(self) -> float:
        """Dials as a member does, again and again where it is dropped. Returns how long that took, in seconds."""
        start = time.monotonic()
        while True:
            with contextlib.suppress(HandshakeBroken, OSError), self.connect() as sock:
                assert dial(sock, secret=SECRET, job="job", me=DIALER, peer=ACCEPTOR) is Verdict.ACCEPT
                return time.monotonic() - start


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.listener.stop()


def scan(door: Door) -> list[socket.socket]:
    for _ in range(200):
        door.connect().close()
    return []


def half_open(door: Door) -> list[socket.socket]:
    return [door.connect() for _ in range(50)]


def thousand(door: Door) -> list[socket.socket]:
    return [door.connect() for _ in range(1000)]


def speak(*messages: bytes) -> Callable[[Door], list[socket.socket]]:
    def stranger(door: Door) -> list[socket.socket]:
        sockets = [door.connect() for _ in range(20)]
        for sock in sockets:
            for message in messages:
                with contextlib.suppress(OSError):  # dropped already
                    sock.sendall(message)
        return sockets

    return stranger


def recorded_handshake(door: Door) -> list[bytes]:
    messages: list[bytes] = []

    class Recorder(socket.socket):
        def sendall(self, data: bytes, *args: object) -> None:
            messages.append(data)
            super().sendall(data)

    with Recorder() as sock:
        sock.connect((door.address, door.listener.port))
        dial(sock, secret=SECRET, job="job", me=DIALER, peer=ACCEPTOR)
    assert door.admitted.pop() == DIALER
    return messages


def replay(door: Door) -> list[socket.socket]:
    messages = recorded_handshake(door)
    return speak(*messages)(door) + speak(b"".join(messages))(door)


def wrong_secret(door: Door) -> list[socket.socket]:
    sockets = [door.connect() for _ in range(20)]
    for sock in sockets:
        with pytest.raises(HandshakeError, match="another job secret"):
            dial(sock, secret=b"another secret 00", job="job", me=DIALER, peer=ACCEPTOR)
    return sockets


def wrong_version(door: Door) -> list[socket.socket]:
    hello = Hello(job_id("job"), DIALER, ACCEPTOR, 0, b"n" * 16).encode()
    sockets = speak(hello[:4] + b"\x63" + hello[5:])(door)
    for sock in sockets:
        assert sock.recv(100)[0] == 0x7C  # is told, not only cut off
    return sockets


STRANGERS: dict[str, Callable[[Door], list[socket.socket]]] = {
    "scan": scan,
    "half-open": half_open,
    "thousand": thousand,
    "http": speak(b"GET / HTTP/1.1\r\n\r\n"),
    "zeros": speak(bytes(100_000)),
    "ones": speak(b"\xff" * 64),
    "one byte": speak(b"M"),
    "hello alone": speak(Hello(job_id("job"), DIALER, ACCEPTOR, 0, b"n" * 16).encode()),
    "unknown job": speak(Hello(job_id("x"), DIALER, ACCEPTOR, 0, b"n" * 16).encode()),
    "lane": speak(Hello(job_id("job"), DIALER, ACCEPTOR, 200, b"n" * 16).encode()),
    "replay": replay,
    "wrong secret": wrong_secret,
    "wrong version": wrong_version,
}


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_strangers_are_dropped_and_a_member_gets_in_at_once(
    door: Door, stranger: Callable[[Door], list[socket.socket]]
) -> None:
    sockets = stranger(door)
    took = door.let_member_in()
    assert door.admitted == [DIALER]
    assert took < 3  # a second, and room for a busy machine
    for sock in sockets:
        sock.settimeout(10)
        with contextlib.suppress(ConnectionResetError):  # what it sent was not read to the end
            while sock.recv(4096):  # a refusal, perhaps; then the end
                pass
        sock.close()
    assert door.admitted == [DIALER]


def test_one_byte_a_turn_does_not_stretch_the_deadline() -> None:
    door = Door(timeout_s=0.5)
    hello = Hello(job_id("job"), DIALER, ACCEPTOR, 0, b"n" * 16).encode()
    try:
        with door.connect() as slow:
            start = time.monotonic()
            sent = 0
            with contextlib.suppress(OSError):
                for byte in hello:
                    slow.send(bytes([byte]))
                    sent += 1
                    slow.settimeout(0.05)
                    with contextlib.suppress(TimeoutError):
                        assert slow.recv(1) == b""
                        break
            assert time.monotonic() - start < 5 and sent < len(hello)
        assert door.let_member_in() < 3
    finally:
        door.listener.stop()


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc, which is Linux's")
def test_memory_descriptors_and_guests_stay_bounded(door: Door) -> None:
    def storm() -> None:
        for sock in thousand(door):
            sock.close()

    storm()
    door.let_member_in()
    before = resident_nbytes()
    most = 0
    for _ in range(5):
        storm()
        most = max(most, len(door.listener._guests))
    door.let_member_in()
    assert most <= 128
    assert resident_nbytes() - before < 8 << 20


def test_a_member_in_the_middle_of_its_handshake_outlives_a_storm(door: Door) -> None:
    # It may be dropped as any other, and comes again; those who are in stay.
    stop = threading.Event()

    def storm() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                sockets = [door.connect() for _ in range(300)]
                for sock in sockets:
                    sock.close()

    threads = [threading.Thread(target=storm) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        times = [door.let_member_in() for _ in range(10)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert door.admitted == [DIALER] * 10
    assert sorted(times)[len(times) // 2] < 3


def without_descriptors(pipe: object, leave: int) -> None:
    """A process whose listener finds `leave` free descriptors, then, once told, a few more."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    door = Door()
    held = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    for descriptor in held[:leave]:
        os.close(descriptor)
    pipe.send(door.listener.port)
    pipe.recv()
    before = time.process_time()
    pipe.poll(0.5)
    pipe.send(time.process_time() - before)
    for descriptor in held[leave : leave + 4]:
        os.close(descriptor)
    pipe.recv()


@pytest.mark.parametrize("leave", [0, 3])
def test_running_out_of_descriptors_is_survived(leave: int) -> None:
    context = multiprocessing.get_context("fork")
    near, far = context.Pipe()
    process = context.Process(target=without_descriptors, args=(far, leave), daemon=True)
    process.start()
    try:
        port = near.recv()

        def member() -> None:
            with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
                assert dial(sock, secret=SECRET, job="job", me=DIALER, peer=ACCEPTOR, timeout_s=20) is Verdict.ACCEPT

        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(leave)]
        if leave:
            member()
        waiting = threading.Thread(target=member)
        if not leave:
            waiting.start()
        near.send("measure")
        busy_s = near.recv()
        assert busy_s < 0.25, "the listener spins"
        if not leave:
            waiting.join(20)
            assert not waiting.is_alive()
        for sock in strangers:
            sock.close()
        near.send("end")
        process.join(20)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


def test_two_listeners_take_two_ports(door: Door) -> None:
    other = Listener(
        address="127.0.0.1",
        port_base=door.listener.port,
        timeout_s=1,
        me=b"o" * 16,
        secret_of=lambda _: None,
        admit=lambda *_: None,
    )
    other.start()
    assert other.port > door.listener.port
    other.stop()


def test_it_listens_on_ipv6() -> None:
    door = Door(address="::1")
    try:
        assert door.let_member_in() < 3
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", door.listener.port), timeout=5)
    finally:
        door.listener.stop()


def test_an_address_of_another_machine_is_a_clear_error() -> None:
    with pytest.raises(OSError, match="MCCL_LISTEN_ADDR"):
        Door(address="192.0.2.77")


def test_strangers_cannot_fill_the_log(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mccl"):
        for sock in STRANGERS["http"](door) + STRANGERS["ones"](door) + scan(door):
            sock.close()
        door.let_member_in()
        assert 1 <= len(caplog.records) <= 3
        assert "127.0.0.1" in caplog.records[0].message


def test_a_line_counts_those_that_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    limited = RateLimitedLog(logging.getLogger("mccl"), interval_s=10, clock=lambda: now[0])
    with caplog.at_level(logging.INFO, "mccl"):
        for number in range(5):
            limited.warn(f"stranger {number}")
        assert limited.due_at() == 10
        now[0] = 10
        limited.flush()
        limited.flush(now=True)
    assert [record.message for record in caplog.records] == [
        "mccl: stranger 0",
        "mccl: stranger 4 (and 3 more like it before)",
    ]
