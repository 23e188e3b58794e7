"""Mutual authentication of two processes before a byte of payload: HMAC-SHA256 challenge and response.

    dialer  → hello      version, job, both process ids, lane, nonce
    acceptor → challenge  nonce, MAC as acceptor
    dialer  → proof      MAC as dialer
    acceptor → verdict    accept, duplicate or busy

A MAC covers (version, job, role, both process ids, lane, both nonces), so nothing can be replayed or reflected.
Messages are JSON behind a 4-byte length, at most MAX_MESSAGE_NBYTES.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

VERSION = 1
MAX_MESSAGE_NBYTES = 4096
MAX_LANES = 16  # two for each of at most eight channels (csrc/engine/channel.hpp)
_LENGTH = struct.Struct(">I")


class HandshakeError(RuntimeError):
    """The other side is not who it should be, or does not speak this protocol."""


class Verdict(enum.Enum):
    """The acceptor's last word."""

    ACCEPT = "accept"
    DUPLICATE = "duplicate"  # the two processes are connected already
    BUSY = "busy"  # the acceptor is dialling itself, and its connection is the one that stays


@dataclass(frozen=True)
class Hello:
    """What a dialer says first."""

    job: str
    dialer: bytes
    acceptor: bytes
    lane: int
    nonce: bytes

    def mac(self, secret: bytes, role: str, acceptor_nonce: bytes) -> str:
        """The proof that `role` ("dialer" or "acceptor") knows the job's secret."""
        parts = [str(VERSION).encode(), self.job.encode(), role.encode()]
        parts += [self.dialer, self.acceptor, str(self.lane).encode(), self.nonce, acceptor_nonce]
        message = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
        return hmac.new(secret, message, hashlib.sha256).hexdigest()


def dial(sock: socket.socket, *, secret: bytes, job: str, me: bytes, peer: bytes, lane: int = 0) -> Verdict:
    """Proves to the process `peer` that this is `me`, and checks the same of it. Blocks, up to the socket's timeout.

    Raises:
        HandshakeError: the peer has another secret, is another process, or does not speak the protocol.
        OSError: the connection broke or timed out.
    """
    hello = Hello(job=job, dialer=me, acceptor=peer, lane=lane, nonce=secrets.token_bytes(16))
    _send(
        sock,
        {"v": VERSION, "job": job, "from": me.hex(), "to": peer.hex(), "lane": lane, "nonce": hello.nonce.hex()},
    )
    challenge = _receive(sock)
    if "error" in challenge:
        raise HandshakeError(str(challenge["error"])[:200])
    nonce = _hex(challenge, "nonce")
    if not _same(challenge.get("mac"), hello.mac(secret, "acceptor", nonce)):
        raise HandshakeError("authentication failed: it has another job secret")
    _send(sock, {"mac": hello.mac(secret, "dialer", nonce)})
    answer = _receive(sock)
    if "error" in answer:
        raise HandshakeError(str(answer["error"])[:200])
    try:
        return Verdict(answer.get("verdict"))
    except ValueError as error:
        raise HandshakeError(f"unexpected answer {answer!r:.100}") from error


Handshake = Generator[int, bytes, "tuple[Hello, Callable[[Verdict], None]]"]


def accept(send: Callable[[bytes], object], *, me: bytes, secret_of: Callable[[str], bytes | None]) -> Handshake:
    """The acceptor's side as a generator: yields how many bytes it wants next, is sent them.

    Returns what the dialer said, and the function that tells it the verdict. It never blocks, so one thread can
    serve any number of strangers.

    Raises:
        HandshakeError: the dialer failed; it has been told.
    """

    def refuse(reason: str) -> HandshakeError:
        send(_encode({"error": reason}))
        return HandshakeError(reason)

    message = yield from _read_message()
    if message.get("v") != VERSION:
        raise refuse(f"protocol version {VERSION} is spoken here, not {message.get('v')!r:.20}")
    hello = Hello(
        job=str(message.get("job")),
        dialer=_hex(message, "from"),
        acceptor=_hex(message, "to"),
        lane=_lane(message),
        nonce=_hex(message, "nonce"),
    )
    secret = secret_of(hello.job)
    if secret is None or hello.acceptor != me:
        raise refuse("authentication failed: unknown job or process")
    nonce = secrets.token_bytes(16)
    send(_encode({"nonce": nonce.hex(), "mac": hello.mac(secret, "acceptor", nonce)}))
    proof = yield from _read_message()
    if not _same(proof.get("mac"), hello.mac(secret, "dialer", nonce)):
        raise refuse("authentication failed: wrong job secret")

    def tell(verdict: Verdict) -> None:
        send(_encode({"verdict": verdict.value}))

    return hello, tell


def _same(given: object, expected: str) -> bool:
    return hmac.compare_digest(str(given).encode(), expected.encode())


def _encode(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HandshakeError("the other side does not speak mccl's handshake") from error
    if not isinstance(message, dict):
        raise HandshakeError("the other side does not speak mccl's handshake")
    return message


def _length(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if not 0 < length <= MAX_MESSAGE_NBYTES:
        raise HandshakeError("the other side does not speak mccl's handshake")
    return int(length)


def _read_message() -> Generator[int, bytes, dict[str, Any]]:
    length = _length((yield _LENGTH.size))
    return _decode((yield length))


def _hex(message: dict[str, Any], field: str) -> bytes:
    try:
        return bytes.fromhex(message[field])
    except (KeyError, TypeError, ValueError) as error:
        raise HandshakeError(f"malformed handshake: {field}") from error


def _lane(message: dict[str, Any]) -> int:
    lane = message.get("lane")
    if not isinstance(lane, int) or not 0 <= lane < MAX_LANES:
        raise HandshakeError("malformed handshake: lane")
    return lane


def _send(sock: socket.socket, message: dict[str, Any]) -> None:
    sock.sendall(_encode(message))


def _receive(sock: socket.socket) -> dict[str, Any]:
    return _decode(_exactly(sock, _length(_exactly(sock, _LENGTH.size))))


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        if not part:
            raise HandshakeError("the other side closed the connection during the handshake")
        data += part
    return data
