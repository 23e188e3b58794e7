"""Who is let in: the handshake's two sides against each other, against a forger between them, and against garbage."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mccl_core._handshake import VERSION, HandshakeBroken, HandshakeError, Hello, Verdict, accept, dial, job_id

SECRET = b"0123456789abcdef"
DIALER, ACCEPTOR = b"d" * 16, b"a" * 16
MESSAGE_NBYTES = (72, 49, 32, 34)  # hello, challenge, proof, verdict
Change = Callable[[int, bytes], bytes]


class Acceptor:
    """The acceptor's side in memory, as a socket that `dial` can use.

    `change(i, message)` may forge the i-th message on its way: 0 hello, 1 challenge, 2 proof, 3 verdict.
    """

    def __init__(self, change: Change = lambda _, message: message, *, secret: bytes = SECRET) -> None:
        self.admitted: list[Hello] = []
        self.refused: list[str] = []
        self._change = change
        self._sent = 0
        self._inbox = b""
        self._outbox = b""
        self._handshake = accept(self._send, me=ACCEPTOR, secret_of={job_id("job"): secret}.get)
        self._wanted = next(self._handshake)

    def _forge(self, index: int, message: bytes) -> bytes:
        return self._change(index, message)

    def _send(self, message: bytes) -> int:
        self._outbox += self._forge(1 if self._sent == 1 else 3, message)
        return len(message)

    def settimeout(self, _: float) -> None:
        pass

    def sendall(self, message: bytes) -> None:
        self._inbox += self._forge(2 * self._sent, message)
        self._sent += 1
        while len(self._inbox) >= self._wanted and not self.admitted and not self.refused:
            part, self._inbox = self._inbox[: self._wanted], self._inbox[self._wanted :]
            try:
                self._wanted = self._handshake.send(part)
            except HandshakeError as error:
                self.refused.append(str(error))
            except StopIteration as done:
                hello, tell = done.value
                self.admitted.append(hello)
                tell(Verdict.ACCEPT)

    def recv(self, nbytes: int) -> bytes:
        part, self._outbox = self._outbox[:nbytes], self._outbox[nbytes:]
        return part


def dial_to(acceptor: object, **changed: object) -> Verdict:
    arguments = {"secret": SECRET, "job": "job", "me": DIALER, "peer": ACCEPTOR} | changed
    return dial(acceptor, **arguments)


def test_both_sides_prove_that_they_know_the_secret() -> None:
    acceptor = Acceptor()
    assert dial_to(acceptor, lane=1) is Verdict.ACCEPT
    (hello,) = acceptor.admitted
    assert (hello.dialer, hello.lane) == (DIALER, 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"secret": b"another secret 00"}, "another job secret"),
        ({"job": "other"}, "does not know this job"),
        ({"peer": b"x" * 16}, "does not know this job"),
    ],
)
def test_a_wrong_dialer_is_refused(changed: dict[str, object], message: str) -> None:
    acceptor = Acceptor()
    with pytest.raises(HandshakeError, match=message):
        dial_to(acceptor, **changed)
    assert not acceptor.admitted


def test_another_version_is_named_on_both_sides() -> None:
    acceptor = Acceptor(lambda index, message: message[:4] + b"\x63" + message[5:] if index == 0 else message)
    with pytest.raises(HandshakeError, match=f"it speaks version {VERSION} of the protocol.*install one release"):
        dial_to(acceptor)
    assert "version 99" in acceptor.refused[0]


@pytest.mark.parametrize("index", range(4), ids=["hello", "challenge", "proof", "verdict"])
def test_a_change_of_any_single_bit_is_refused(index: int) -> None:
    for bit in range(8 * MESSAGE_NBYTES[index]):

        def flip(i: int, message: bytes, bit: int = bit) -> bytes:
            if i != index or len(message) != MESSAGE_NBYTES[index]:
                return message
            return (int.from_bytes(message) ^ (1 << bit)).to_bytes(len(message))

        acceptor = Acceptor(flip)
        with pytest.raises(HandshakeError):
            dial_to(acceptor)
        # The acceptor, too, refuses, unless its own last word is what was changed.
        assert bool(acceptor.admitted) == (index == 3), bit


@given(index=st.integers(0, 3), forged=st.binary(max_size=200))
def test_a_message_replaced_by_any_bytes_is_refused(index: int, forged: bytes) -> None:
    acceptor = Acceptor(lambda i, message: forged if i == index else message)
    with pytest.raises(HandshakeError):
        dial_to(acceptor)
    assert bool(acceptor.admitted) == (index == 3)


@given(data=st.binary(max_size=400), opening=st.sampled_from([b"", b"MCCL", b"MCCL\x02\0\0\0"]))
def test_no_bytes_of_a_stranger_are_accepted_or_make_it_ask_for_many(data: bytes, opening: bytes) -> None:
    sent: list[bytes] = []

    def send(message: bytes) -> int:
        sent.append(message)
        return len(message)

    handshake = accept(send, me=ACCEPTOR, secret_of={job_id("job"): SECRET}.get)
    wanted = next(handshake)
    data = opening + data
    while len(data) >= wanted:
        part, data = data[:wanted], data[wanted:]
        try:
            wanted = handshake.send(part)
        except HandshakeError:
            break
        assert wanted <= 64
    assert sum(map(len, sent)) <= 3  # a refusal at most


@settings(deadline=None, max_examples=50)
@given(data=st.binary(max_size=200), closes=st.booleans())
def test_any_bytes_from_an_acceptor_end_in_an_error_in_time(data: bytes, closes: bool) -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(data)
        if closes:
            far.shutdown(socket.SHUT_WR)
        start = time.monotonic()
        with pytest.raises(HandshakeError):
            dial_to(near, timeout_s=0.05)
        assert time.monotonic() - start < 5


def test_a_trickle_does_not_stretch_the_dialers_deadline() -> None:
    near, far = socket.socketpair()
    stop = threading.Event()

    def trickle() -> None:
        far.send(b"\x51")
        while not stop.wait(0.02):
            far.send(b"x")

    thread = threading.Thread(target=trickle)
    with near, far:
        thread.start()
        try:
            with pytest.raises(HandshakeBroken, match=r"in time|timed out"):
                dial_to(near, timeout_s=0.3)
        finally:
            stop.set()
            thread.join()


def test_an_acceptor_without_the_secret_is_found_out() -> None:
    impostor = Acceptor(secret=b"guessed secret 00")
    with pytest.raises(HandshakeError, match="another job secret"):
        dial_to(impostor)
    assert not impostor.admitted


def test_a_challenge_reflected_to_its_sender_is_not_a_proof() -> None:
    # Without the secret: what the acceptor sent is sent back to it.
    challenges: list[bytes] = []

    def reflect(index: int, message: bytes) -> bytes:
        if index == 1:
            challenges.append(message)
        return challenges[0][-32:] if index == 2 else message

    acceptor = Acceptor(reflect)
    with pytest.raises(HandshakeError, match="another job secret"):
        dial_to(acceptor)
    assert not acceptor.admitted


def test_a_replayed_proof_does_not_open_the_door() -> None:
    recorded: list[bytes] = []

    def record(index: int, message: bytes) -> bytes:
        recorded.append(message)
        return message

    dial_to(Acceptor(record))
    again = Acceptor()
    again.sendall(recorded[0])
    again.sendall(recorded[2])
    assert not again.admitted and "wrong job secret" in again.refused[0]
