"""How the ranks of a new group find each other: each publishes a record in the c10d store and reads the others'."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError
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


class _Record(BaseModel):
    """What a rank publishes about itself; `mac` proves that it knows the job's secret."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    process: str = Field(pattern=r"^[0-9a-f]{32}$")
    host: str
    address: str
    port: int = Field(ge=1, le=65535)
    switch_group: str
    wire: dict[str, int]
    compression: str
    mac: str = ""

    def signed(self, secret: bytes, group_id: int, rank: int) -> _Record:
        message = json.dumps(["record", group_id, rank, self.model_dump(exclude={"mac"})], sort_keys=True)
        return self.model_copy(update={"mac": hmac.new(secret, message.encode(), hashlib.sha256).hexdigest()})


def meet(runtime: Runtime, store: Any, rank: int, size: int, timeout: timedelta, compression: str = "none") -> Meeting:
    """Publishes this rank, reads all others. Blocks until all `size` ranks are there.

    Args:
        compression: in words, which must be the same on all ranks.

    Raises:
        DistBackendError: a rank did not appear within `timeout`, has another job secret or another compression; the
            text names it.
    """
    store = _meeting_place(store, rank)
    try:
        group_id, job, secret = _agree(runtime, store, rank, timeout)
    except (DistBackendError, ValueError) as error:
        # Nobody shall wait for a rank that cannot come.
        store.set(_key(rank), json.dumps({"error": str(error)}))
        raise
    runtime.trust(job, secret)
    own = _own_record(runtime, compression)
    store.set(_key(rank), own.signed(secret, group_id, rank).model_dump_json())
    me = f"rank {rank} on {runtime.config.host_name}"
    peers: list[Peer] = []
    switch_groups: list[str] = []
    compressions: list[str] = []
    strangers: list[str] = []
    for other, raw in enumerate(_read_all(store, size, timeout)):
        record = _parse(other, raw)
        peer = Peer(other, bytes.fromhex(record.process), record.host, record.address, record.port)
        if not hmac.compare_digest(record.mac.encode(), record.signed(secret, group_id, other).mac.encode()):
            strangers.append(f"{other} on {peer.host}")
            continue
        _check_wire(me, own, peer, record)
        _check_reach(me, own, peer)
        peers.append(peer)
        switch_groups.append(record.switch_group)
        compressions.append(record.compression)
        runtime.know(peer)
    if strangers:
        raise DistBackendError(
            f"mccl: {me}: authentication failed: another job secret than "
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


def decline(store: Any, rank: int, reason: str) -> None:
    """In place of `meet`: tells the others why this rank cannot come, so that they do not wait for it."""
    store = _meeting_place(store, rank)
    said = json.dumps({"error": reason})
    if rank == 0:
        store.set("group", said)
    store.set(_key(rank), said)


def _meeting_place(store: Any, rank: int) -> Any:
    """A store may be used again for a new group of the same name: each meeting has keys of its own."""
    return dist.PrefixStore(f"mccl/{store.add(f'mccl/meetings/{rank}', 1)}", store)


def _parse(rank: int, raw: bytes) -> _Record:
    try:
        said = json.loads(raw)
        if isinstance(said, dict) and "error" in said:
            raise DistBackendError(f"mccl: rank {rank} could not join the group: {said['error']}")
        return _Record.model_validate(said)
    except (ValueError, ValidationError) as error:
        raise DistBackendError(
            f"mccl: what rank {rank} has published in the store is not a record of this release; install one release "
            "of mccl-fleet on all ranks, and let nobody else reach the store's port"
        ) from error


def _check_wire(me: str, own: _Record, peer: Peer, record: _Record) -> None:
    for name in sorted(own.wire.keys() | record.wire.keys()):
        here, there = own.wire.get(name), record.wire.get(name)
        if here != there:
            raise DistBackendError(
                f"mccl: {me}: {name} (MCCL_{name.upper()}) is {here} here, but {there} on rank {peer.rank} on "
                f"{peer.host}; set it alike on all ranks"
            )


def _check_reach(me: str, own: _Record, peer: Peer) -> None:
    """Two machines, one of which listens on its loopback interface, will not find each other."""
    try:
        here, there = ip_address(own.address).is_loopback, ip_address(peer.address).is_loopback
    except ValueError as error:
        raise DistBackendError(f"mccl: {me}: {peer} has published no IP address") from error
    if here != there and own.host != peer.host:
        hidden = "this rank" if here else f"rank {peer.rank}"
        raise DistBackendError(
            f"mccl: {me}: {hidden} listens on its loopback interface: this rank on {own.address}, {peer}; set "
            "MASTER_ADDR to an address of the network that the ranks share, or MCCL_IFNAME (or MCCL_LISTEN_ADDR) there"
        )


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


def _own_record(runtime: Runtime, compression: str) -> _Record:
    config = runtime.config
    return _Record(
        process=runtime.process.hex(),
        host=config.host_name,
        address=runtime.address,
        port=runtime.port,
        switch_group=config.switch_group,
        wire=config.wire_settings(),
        compression=compression,
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
