"""Mutual authentication of two processes before a byte of payload: HMAC-SHA256 challenge and response.

    dialer   → hello      "MCCL", version, lane; job, both process ids, nonce
    acceptor → challenge  nonce, MAC as acceptor
    dialer   → proof      MAC as dialer
    acceptor → verdict    accept, duplicate or busy, and a MAC over it

Every MAC covers the whole hello (so version, job, process ids, lane and the dialer's nonce), the acceptor's nonce and
the role, so nothing can be replayed or reflected. In place of a challenge or a verdict the acceptor may send a refusal,
which says why. All messages have a fixed size: nothing that a stranger sends decides how much is read or kept.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

VERSION = 2  # of the handshake and of the frames that follow it
MAX_LANES = 16  # two for each of at most eight channels (csrc/engine/channel.hpp)
_MAGIC = b"MCCL"
_ID_NBYTES = 16  # of a process, a job, a nonce
_MAC_NBYTES = 32
_OPENING = struct.Struct(">4sBBH")  # magic, version, lane, nothing
_HELLO = struct.Struct(f">{_ID_NBYTES}s{_ID_NBYTES}s{_ID_NBYTES}s{_ID_NBYTES}s")  # job, dialer, acceptor, nonce


class HandshakeError(RuntimeError):
    """The other side is not who it should be, or does not speak this protocol."""


class HandshakeBroken(HandshakeError):
    """The connection ended, or the deadline passed, before the last word: another attempt may do better."""


class Verdict(enum.Enum):
    """The acceptor's last word."""

    ACCEPT = 1
    DUPLICATE = 2  # the two processes are connected already
    BUSY = 3  # the acceptor is dialling itself, and its connection is the one that stays


class _Kind(enum.IntEnum):
    """First byte of what an acceptor sends."""

    CHALLENGE = 0x51
    VERDICT = 0x62
    REFUSAL = 0x7C


class _Reason(enum.IntEnum):
    """Second byte of a refusal; the third is the version that the acceptor speaks."""

    VERSION = 1
    UNKNOWN = 2
    SECRET = 3


@dataclass(frozen=True)
class Hello:
    """What a dialer says first. `job`, `dialer`, `acceptor` and `nonce` have 16 bytes each."""

    job: bytes
    dialer: bytes
    acceptor: bytes
    lane: int
    nonce: bytes

    def encode(self) -> bytes:
        """The bytes on the wire."""
        opening = _OPENING.pack(_MAGIC, VERSION, self.lane, 0)
        return opening + _HELLO.pack(self.job, self.dialer, self.acceptor, self.nonce)

    def mac(self, secret: bytes, role: bytes, acceptor_nonce: bytes, said: bytes = b"") -> bytes:
        """The proof that `role` (b"dialer" or b"acceptor") knows the job's secret, and stands by what it `said`."""
        message = role.ljust(_ID_NBYTES, b"\0") + self.encode() + acceptor_nonce + said
        return hmac.new(secret, message, hashlib.sha256).digest()


def job_id(job: str) -> bytes:
    """How a job is called on the wire."""
    return hashlib.sha256(job.encode()).digest()[:_ID_NBYTES]


def dial(
    sock: socket.socket, *, secret: bytes, job: str, me: bytes, peer: bytes, lane: int = 0, timeout_s: float = 5.0
) -> Verdict:
    """Proves to the process `peer` that this is `me`, and checks the same of it. Blocks, `timeout_s` at most in all.

    Raises:
        HandshakeBroken: the connection ended or the time is over.
        HandshakeError: the peer has another secret, is another process, or does not speak the protocol.
    """
    line = _Line(sock, time.monotonic() + timeout_s)
    hello = Hello(job_id(job), dialer=me, acceptor=peer, lane=lane, nonce=secrets.token_bytes(_ID_NBYTES))
    line.send(hello.encode())
    nonce, mac = _split(line.answer(_Kind.CHALLENGE, _ID_NBYTES + _MAC_NBYTES), _ID_NBYTES)
    if not hmac.compare_digest(mac, hello.mac(secret, b"acceptor", nonce)):
        raise HandshakeError("authentication failed: it has another job secret")
    line.send(hello.mac(secret, b"dialer", nonce))
    said, mac = _split(line.answer(_Kind.VERDICT, 1 + _MAC_NBYTES), 1)
    if not hmac.compare_digest(mac, hello.mac(secret, b"acceptor", nonce, said)):
        raise HandshakeError("authentication failed: its verdict is not its own")
    return Verdict(said[0])  # by an authenticated acceptor of this version


Handshake = Generator[int, bytes, "tuple[Hello, Callable[[Verdict], None]]"]


def accept(send: Callable[[bytes], int], *, me: bytes, secret_of: Callable[[bytes], bytes | None]) -> Handshake:
    """The acceptor's side as a generator: yields how many bytes it wants next, is sent exactly those.

    `send` returns how many bytes it took, as a non-blocking socket's does; `secret_of` the secret of a job (see
    `job_id`), or None. Returns what the dialer said, and the function that tells it the verdict. It never blocks, so
    that one thread can serve any number of strangers.

    Raises:
        HandshakeError: the dialer failed; it has been told, unless it does not even speak the protocol.
        OSError: by `send`.
    """

    def say(message: bytes) -> None:
        if send(message) != len(message):
            raise HandshakeError("it does not read what it is sent")

    def refuse(reason: _Reason, text: str) -> HandshakeError:
        say(bytes([_Kind.REFUSAL, reason, VERSION]))
        return HandshakeError(text)

    magic, version, lane, nothing = _OPENING.unpack((yield _OPENING.size))
    if magic != _MAGIC:
        raise HandshakeError("it does not speak mccl's handshake")
    if version != VERSION:
        raise refuse(_Reason.VERSION, f"it speaks version {version} of the protocol, this process {VERSION}")
    if lane >= MAX_LANES or nothing != 0:
        raise HandshakeError("malformed hello")
    job, dialer, acceptor, nonce = _HELLO.unpack((yield _HELLO.size))
    hello = Hello(job, dialer, acceptor, lane, nonce)
    secret = secret_of(job)
    if secret is None or acceptor != me:
        raise refuse(_Reason.UNKNOWN, "authentication failed: it asks for another job or process")
    own_nonce = secrets.token_bytes(_ID_NBYTES)
    say(bytes([_Kind.CHALLENGE]) + own_nonce + hello.mac(secret, b"acceptor", own_nonce))
    proof = yield _MAC_NBYTES
    if not hmac.compare_digest(proof, hello.mac(secret, b"dialer", own_nonce)):
        raise refuse(_Reason.SECRET, "authentication failed: wrong job secret")

    def tell(verdict: Verdict) -> None:
        said = bytes([verdict.value])
        say(bytes([_Kind.VERDICT]) + said + hello.mac(secret, b"acceptor", own_nonce, said))

    return hello, tell


class _Line:
    """A socket with one deadline for all that is sent and received."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def send(self, message: bytes) -> None:
        try:
            self._arm()
            self._sock.sendall(message)
        except OSError as error:
            raise HandshakeBroken(f"the handshake broke off: {error.strerror or error}") from error

    def answer(self, kind: _Kind, nbytes: int) -> bytes:
        """What follows the byte `kind`; a refusal, or anything else, is raised."""
        got = self._exactly(1)[0]
        if got == _Kind.REFUSAL:
            reason, version = self._exactly(2)
            raise HandshakeError(_refusal_text(reason, version))
        if got != kind:
            raise HandshakeError("it does not speak mccl's handshake")
        return self._exactly(nbytes)

    def _exactly(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            try:
                self._arm()
                part = self._sock.recv(nbytes - len(data))
            except OSError as error:
                raise HandshakeBroken(f"the handshake broke off: {error.strerror or error}") from error
            if not part:
                raise HandshakeBroken("it closed the connection during the handshake")
            data += part
        return data

    def _arm(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("not finished in time")
        self._sock.settimeout(left)


def _refusal_text(reason: int, version: int) -> str:
    if reason == _Reason.VERSION:
        return f"it speaks version {version} of the protocol, this process {VERSION}; install one release everywhere"
    if reason == _Reason.UNKNOWN:
        return "authentication failed: it does not know this job, or another process has its port now"
    if reason == _Reason.SECRET:
        return "authentication failed: it has another job secret"
    return "it does not speak mccl's handshake"


def _split(data: bytes, at: int) -> tuple[bytes, bytes]:
    return data[:at], data[at:]
