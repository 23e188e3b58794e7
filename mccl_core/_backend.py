"""Builds the backend of one process group: meet, connect, hand over to C++."""

from __future__ import annotations

import logging
import time
from typing import Any

from mccl_core import links
from mccl_core._C import ProcessGroupMCCL
from mccl_core._rendezvous import local_address, meet
from mccl_core._runtime import get_runtime
from mccl_core.compression import GroupCompression, Options
from mccl_core.config import CoreConfig
from mccl_core.planning import number_groups, planner_options

log = logging.getLogger("mccl")


def create(options: Any, backend_options: Any) -> ProcessGroupMCCL:
    """Called by torch.distributed on every rank of a new group. Blocks until all ranks are there and linked.

    Raises:
        SettingsError: an MCCL_* variable cannot be used.
        TypeError: `backend_options`, the caller's pg_options, is no `mccl_core.Options`.
        DistBackendError: a rank is missing, unreachable or has another secret; the text says which and what to do.
    """
    if backend_options is not None and not isinstance(backend_options, Options):
        raise TypeError(
            f"pg_options: the backend 'mccl' takes mccl_core.Options, not {type(backend_options).__name__}; "
            'say pg_options=mccl_core.Options(compression="bf16"), or set MCCL_* variables'
        )
    config = CoreConfig.from_environment()
    compression = GroupCompression.of(config, backend_options)
    log.setLevel(config.log_level.upper())
    store, rank, size = options.store, options.group_rank, options.group_size
    runtime = get_runtime(config, lambda: local_address(store))
    meeting = meet(runtime, store, rank, size, options.timeout, str(compression))

    lanes = range(2 if size == 2 else 1)  # as the engine's Group has it

    def connect(ranks: list[int]) -> None:
        for other in ranks:
            for lane in lanes:
                runtime.dial(meeting.peers[other], meeting.job, lane)

    members = [(peer.process, peer.host) for peer in meeting.peers]
    hosts = [peer.host for peer in meeting.peers]
    profile = links.load(config.link_profile) if config.link_profile else links.default_profile(hosts)
    planner = planner_options(config, profile, number_groups(meeting.switch_groups))
    backend = ProcessGroupMCCL(
        runtime.engine, meeting.group_id, rank, members, planner, options.timeout, connect, compression.core_options()
    )
    # Of each pair that is linked from the start the lower rank dials.
    linked = linked_ranks(rank, size)
    connect([other for other in linked if other > rank])
    deadline = time.monotonic() + config.connect_timeout_ms / 1000
    for other in linked:
        if other < rank:
            for lane in lanes:
                runtime.await_connection(meeting.peers[other], lane, deadline)
    return backend


def linked_ranks(rank: int, size: int) -> list[int]:
    """The ranks that `rank` is connected to from the start: its ring neighbours and all at a power of two from it."""
    distances = [1 << k for k in range(max(size - 1, 0).bit_length())]
    return sorted({(rank + s * d) % size for d in distances if d < size for s in (1, -1)} - {rank})
