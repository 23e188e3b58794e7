"""What is left to do once the survivors of a group have agreed: a group of their own, and a store that lives."""

from __future__ import annotations

import hashlib
import logging
import socket
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import DistBackendError
from torch.distributed import distributed_c10d as c10d

from mccl_core._C import ProcessGroupMCCL
from mccl_core._rendezvous import Meeting

log = logging.getLogger("mccl")

_ADDRESS_NBYTES = 128
Make = Callable[[Meeting, int], tuple[ProcessGroupMCCL, Callable[[], None]]]


class Regroup:
    """Makes one group's successor. The group's backend owns it.

    Args:
        meeting: the group's members.
        rank: this process's rank in it.
        address: where this process listens.
        timeout: for a connection.
        make: the backend of a meeting and a rank in it, and the function that links it.
    """

    _of_group: ClassVar[weakref.WeakValueDictionary[int, Regroup]] = weakref.WeakValueDictionary()

    def __init__(self, meeting: Meeting, rank: int, *, address: str, timeout: timedelta, make: Make) -> None:
        self._meeting = meeting
        self._rank = rank
        self._address = address
        self._timeout = timeout
        self._make = make
        self._prepared: tuple[list[int], ProcessGroupMCCL] | None = None
        self._of_group[meeting.group_id] = self

    @classmethod
    def of(cls, backend: ProcessGroupMCCL) -> Regroup:
        """The one that a backend owns."""
        return cls._of_group[backend.group_id]

    def __call__(self, excluded: list[int], agreed: bool) -> ProcessGroupMCCL | None:
        """What torch's shrink_group gets: the successor without just these ranks.

        Raises:
            DistBackendError: more ranks were lost meanwhile.
        """
        if not agreed:
            prepared, self._prepared = self._prepared, None
            return prepared[1] if prepared is not None and prepared[0] == excluded else None
        all_excluded, backend = self._settle(excluded)
        if all_excluded != excluded:
            raise DistBackendError(
                f"mccl: rank {self._rank}: more ranks were lost while the group shrank; those who are left agreed on "
                f"excluding {', '.join(map(str, all_excluded))}. Call shrink_group again with just these, or "
                "mccl_core.shrink(), which needs no list"
            )
        return backend

    def prepare(self, excluded: list[int]) -> list[int]:
        """Makes the successor and keeps it for `shrink_group`; returns all who are not in it. Blocks."""
        all_excluded, backend = self._settle(excluded)
        self._prepared = all_excluded, backend
        return all_excluded

    def _settle(self, excluded: list[int]) -> tuple[list[int], ProcessGroupMCCL]:
        """A group that all of its members have entered. Whoever is lost meanwhile is excluded, too."""
        size = len(self._meeting.peers)
        gone = sorted(excluded)
        meeting, number = self._meeting, self._rank
        leave = gone
        while True:
            number -= sum(rank < number for rank in leave)
            meeting = smaller_meeting(meeting, leave)
            stay = [rank for rank in range(size) if rank not in gone]
            backend, link = self._make(meeting, number)
            try:
                link()
                store = share_store(backend, number, self._address, self._timeout)
                backend.barrier(dist.BarrierOptions()).wait()
            except DistBackendError as error:
                log.warning("mccl: the group that was to go on failed, too: %s", error)
                leave = backend.agree([])
                if not leave:
                    raise
                gone = sorted([*gone, *(stay[rank] for rank in leave)])
                continue
            replace_store(self._meeting.group_id, store)
            return gone, backend


def smaller_meeting(meeting: Meeting, excluded: list[int]) -> Meeting:
    """The members who stay, renumbered in order; the new group's id follows from the old one and from who left."""
    stay = [rank for rank in range(len(meeting.peers)) if rank not in excluded]
    seed = f"{meeting.group_id} without {sorted(excluded)}"
    group_id = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") >> 1
    return Meeting(
        group_id=group_id,
        job=meeting.job,
        peers=[replace(meeting.peers[rank], rank=number) for number, rank in enumerate(stay)],
        switch_groups=[meeting.switch_groups[rank] for rank in stay],
    )


class SharedStore(dist.TCPStore):
    """A store that torch's shrink_group does not dial a second time: its host may be dead by then."""

    def clone(self) -> SharedStore:
        """This store itself; it may be used from several threads."""
        return self


def serve_store(address: str) -> SharedStore:
    """A store in this process, on a free port of `address` and no other one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        return SharedStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def share_store(backend: Any, rank: int, address: str, timeout: timedelta) -> SharedStore:
    """The new group's store, in its rank 0: the old one's host may be dead. Collective; blocks."""
    message = torch.zeros(_ADDRESS_NBYTES, dtype=torch.uint8)
    store = None
    if rank == 0:
        store = serve_store(address)
        text = f"{address} {store.port}".encode()
        message[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    backend.broadcast([message], options).wait()
    if store is None:
        host, port = bytes(message.tolist()).rstrip(b"\0").decode().split()
        store = SharedStore(host, int(port), is_master=False, timeout=timeout)
    return store


def replace_store(group_id: int, store: dist.Store) -> None:
    """Makes torch continue with `store` where it would take the old group's for the new one."""
    pg_map = c10d._world.pg_map
    for group, (backend_name, _) in list(pg_map.items()):
        if _is_group(group, group_id):
            pg_map[group] = (backend_name, store)


def _is_group(group: Any, group_id: int) -> bool:
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # it has none for the CPU
        return False
    return isinstance(backend, ProcessGroupMCCL) and backend.group_id == group_id
