"""How the ranks of a new group find each other: each publishes a record in the c10d store and reads the others'."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistBackendError

from mccl_core._runtime import Peer, Runtime

log = logging.getLogger("mccl")

_GIVEN = "given"  # the job's name where the user gave the secret


@dataclass(frozen=True)
class Meeting:
    """What all ranks of a group have agreed on."""

    group_id: int
    job: str
    peers: list[Peer]
    switch_groups: list[str]  # by rank


def local_address(store: Any) -> str:
    """The address of this machine on the route to the store's host; loopback where the store has no host."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host = getattr(store, "host", "127.0.0.1")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing: it only asks the routing table
            return str(probe.getsockname()[0])
    except OSError as error:
        raise DistBackendError(
            f"mccl: no route to the store's host {host!r}: {error.strerror or error}; set MCCL_LISTEN_ADDR to this "
            "machine's address on the network that the ranks share"
        ) from error


def meet(runtime: Runtime, store: Any, rank: int, size: int, timeout: timedelta, compression: str = "none") -> Meeting:
    """Publishes this rank, reads all others. Blocks until all `size` ranks are there.

    Args:
        compression: in words, which must be the same on all ranks.

    Raises:
        DistBackendError: a rank did not appear within `timeout`, has another job secret or another compression; the
            text names it.
    """
    # A store may be used again for a new group of the same name: each meeting has keys of its own.
    store = dist.PrefixStore(f"mccl/{store.add(f'mccl/meetings/{rank}', 1)}", store)
    try:
        group_id, job, secret = _agree(runtime, store, rank, timeout)
    except (DistBackendError, ValueError) as error:
        # Nobody shall wait for a rank that cannot come.
        store.set(_key(rank), json.dumps({"error": str(error)}))
        raise
    runtime.trust(job, secret)
    store.set(_key(rank), _record(runtime, group_id, secret, rank, compression))
    peers: list[Peer] = []
    switch_groups: list[str] = []
    compressions: list[str] = []
    strangers: list[str] = []
    for other, raw in enumerate(_read_all(store, size, timeout)):
        record = json.loads(raw)
        if "error" in record:
            raise DistBackendError(f"mccl: rank {other} could not join the group: {record['error']}")
        peer = Peer(other, bytes.fromhex(record["process"]), record["host"], record["address"], record["port"])
        switch_groups.append(record["switch_group"])
        compressions.append(record["compression"])
        if not hmac.compare_digest(record["mac"], _mac(secret, group_id, peer, switch_groups[-1], compressions[-1])):
            strangers.append(f"{other} on {peer.host}")
        peers.append(peer)
        runtime.know(peer)
    if strangers:
        raise DistBackendError(
            f"mccl: rank {rank} on {runtime.config.host_name}: authentication failed: another job secret than "
            f"this rank's is used by rank {', rank '.join(strangers)}; "
            "give all ranks the same MCCL_SECRET or MCCL_SECRET_FILE"
        )
    for other, peer in enumerate(peers):
        if compressions[other] != compressions[0]:
            raise DistBackendError(
                f"mccl: rank 0 on {peers[0].host} compresses with {compressions[0]}, but rank {other} on {peer.host} "
                f"with {compressions[other]}; give all ranks the same pg_options, or the same MCCL_COMPRESSION* and "
                "MCCL_TOPK_* variables"
            )
    return Meeting(group_id, job, peers, switch_groups)


def _agree(runtime: Runtime, store: Any, rank: int, timeout: timedelta) -> tuple[int, str, bytes]:
    """Rank 0 names the group and, where no secret was given, makes one that travels through the store."""
    try:
        given = runtime.config.read_secret()
    except ValueError as error:
        if rank == 0:
            store.set("group", json.dumps({"error": str(error)}))
        raise
    if rank == 0:
        offer: dict[str, Any] = {"group": secrets.randbits(63), "job": _GIVEN}
        if given is None:
            offer |= {"job": secrets.token_hex(8), "secret": secrets.token_hex(32)}
            log.info("mccl: no MCCL_SECRET or MCCL_SECRET_FILE is set: rank 0 made a secret for this group and "
                     "passes it through the c10d store")  # fmt: skip
        store.set("group", json.dumps(offer))
    else:
        offer = json.loads(_read(store, "group", timeout, "rank 0 did not appear"))
    if "error" in offer:
        raise DistBackendError(f"mccl: rank 0 could not make the group: {offer['error']}")
    made = offer.get("secret")
    if made is None and given is None:
        raise DistBackendError(
            f"mccl: rank {rank} on {runtime.config.host_name} has no job secret, but rank 0 uses one; "
            "set the same MCCL_SECRET or MCCL_SECRET_FILE on all ranks"
        )
    if made is not None and given is not None:
        raise DistBackendError(
            f"mccl: rank {rank} on {runtime.config.host_name} was given a job secret, but rank 0 was not; "
            "set the same MCCL_SECRET or MCCL_SECRET_FILE on all ranks"
        )
    secret = given if given is not None else bytes.fromhex(str(made))
    return int(offer["group"]), str(offer["job"]), secret


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _mac(secret: bytes, group_id: int, peer: Peer, switch_group: str, compression: str) -> str:
    fields = (group_id, peer.rank, peer.process.hex(), peer.host, peer.address, peer.port, switch_group, compression)
    message = json.dumps(["record", *fields])
    return hmac.new(secret, message.encode(), hashlib.sha256).hexdigest()


def _record(runtime: Runtime, group_id: int, secret: bytes, rank: int, compression: str) -> str:
    me = Peer(rank, runtime.process, runtime.config.host_name, runtime.address, runtime.port)
    return json.dumps(
        {
            "process": me.process.hex(),
            "host": me.host,
            "address": me.address,
            "port": me.port,
            "switch_group": runtime.config.switch_group,
            "compression": compression,
            "mac": _mac(secret, group_id, me, runtime.config.switch_group, compression),
        }
    )


def _read(store: Any, key: str, timeout: timedelta, complaint: str) -> bytes:
    try:
        store.wait([key], timeout)
    except RuntimeError as error:  # DistStoreError
        raise DistBackendError(
            f"mccl: {complaint} within {timeout.total_seconds():.0f} s; see that rank's log, or raise the timeout of "
            "init_process_group"
        ) from error
    return bytes(store.get(key))


def _read_all(store: Any, size: int, timeout: timedelta) -> list[bytes]:
    keys = [_key(rank) for rank in range(size)]
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [str(rank) for rank in range(size) if not store.check([_key(rank)])]
        raise DistBackendError(
            f"mccl: these ranks did not appear within {timeout.total_seconds():.0f} s: {', '.join(missing)} of {size}; "
            "see their logs, or raise the timeout of init_process_group"
        ) from error
    if store.has_extended_api():
        return [bytes(value) for value in store.multi_get(keys)]
    return [bytes(store.get(key)) for key in keys]
