"""Builds the backend of one process group: meet, connect, hand over to C++."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistBackendError
from torch.distributed.constants import default_pg_timeout

from mccl_core import flight, links
from mccl_core._C import ProcessGroupMCCL
from mccl_core._ddp import use_buckets_of
from mccl_core._environment import remark_once
from mccl_core._network import NetworkError, choose, store_host
from mccl_core._rendezvous import Meeting, decline, meet
from mccl_core._runtime import Runtime, get_runtime
from mccl_core._shrink import Regroup
from mccl_core.compression import GroupCompression, Options
from mccl_core.config import CoreConfig, environment
from mccl_core.planning import number_groups, planner_options
from mccl_core.prometheus import metrics_text

log = logging.getLogger("mccl")


@dataclass(frozen=True)
class _Request:
    """What torch.distributed says of a new group, for one that is split off another."""

    store: Any
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str


def create(options: Any, backend_options: Any, *, profile_name: str = "mccl") -> ProcessGroupMCCL:
    """Called by torch.distributed on every rank of a new group. Blocks until all ranks are there and linked.

    `profile_name` is how torch's profiles call the backend.

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
    timeout = options.timeout
    if config.op_timeout_ms is not None and timeout == default_pg_timeout:
        timeout = timedelta(milliseconds=config.op_timeout_ms)
    if config.ddp_bucket_mb is not None:
        use_buckets_of(config.ddp_bucket_mb)
    try:
        runtime = get_runtime(config, lambda: choose(config, store_host(store)))
    except (NetworkError, OSError) as error:
        decline(store, rank, str(error))
        raise DistBackendError(f"mccl: rank {rank} on {config.host_name}: {error}") from error
    runtime.serve_metrics(metrics_text)
    meeting = meet(runtime, store, rank, size, timeout, str(compression))
    hosts = [peer.host for peer in meeting.peers]
    if hosts.index(hosts[rank]) == rank:  # one of each machine's ranks speaks for all
        remark_once(environment())
    flight.name_group(meeting.group_id, str(getattr(options, "group_id", "")))
    backend, link = _make(runtime, config, compression, meeting, rank, timeout, profile_name)
    link()
    return backend


def _make(
    runtime: Runtime,
    config: CoreConfig,
    compression: GroupCompression,
    meeting: Meeting,
    rank: int,
    timeout: timedelta,
    profile_name: str,
) -> tuple[ProcessGroupMCCL, Callable[[], None]]:
    """The backend of a group whose members know each other, and what links it to them, which blocks."""
    size = len(meeting.peers)

    def connect(other: int, channel: int) -> None:
        for lane in lanes(size, channel):
            runtime.dial(meeting.peers[other], meeting.job, lane)

    def make_smaller(smaller: Meeting, number: int) -> tuple[ProcessGroupMCCL, Callable[[], None]]:
        flight.name_group(smaller.group_id, f"{flight.name_of(meeting.group_id)}, shrunk")
        return _make(runtime, config, compression, smaller, number, timeout, profile_name)

    def make(store: Any, rank: int, size: int, timeout: timedelta, name: str) -> ProcessGroupMCCL:
        return create(_Request(store, rank, size, timeout, name), compression.options(), profile_name=profile_name)

    def on_failure(text: str) -> None:
        flight.dump(config.flight_record_file, group=meeting.group_id, error=text, rank=rank)

    def link() -> None:
        # Of each pair that is linked from the start the lower rank dials. That is on the first channel; links on
        # further ones are made by the first op that is spread over several.
        linked = linked_ranks(rank, size)
        for other in linked:
            if other > rank:
                connect(other, 0)
        deadline = time.monotonic() + config.connect_timeout_ms / 1000
        for other in linked:
            if other < rank:
                for lane in lanes(size, channel=0):
                    runtime.await_connection(meeting.peers[other], lane, deadline)

    members = [(peer.process, peer.host) for peer in meeting.peers]
    hosts = [peer.host for peer in meeting.peers]
    profile = links.load(config.link_profile) if config.link_profile else links.default_profile(hosts)
    planner = planner_options(config, profile, number_groups(meeting.switch_groups))
    connect_timeout = timedelta(milliseconds=config.connect_timeout_ms)
    regroup = Regroup(meeting, rank, address=runtime.address, timeout=connect_timeout, make=make_smaller)
    backend = ProcessGroupMCCL(
        runtime.engine,
        meeting.group_id,
        rank,
        members,
        planner,
        timeout,
        connect=connect,
        regroup=regroup,
        compression=compression.core_options(),
        make=make,
        on_failure=on_failure,
        name=profile_name,
    )
    return backend, link


def lanes(size: int, channel: int) -> list[int]:
    """The lanes of a channel in a group of `size` ranks, as the engine's Group has them."""
    return [2 * channel, 2 * channel + 1] if size == 2 else [2 * channel]


def linked_ranks(rank: int, size: int) -> list[int]:
    """The ranks that `rank` is connected to from the start: its ring neighbours and all at a power of two from it."""
    distances = [1 << k for k in range(max(size - 1, 0).bit_length())]
    return sorted({(rank + s * d) % size for d in distances if d < size for s in (1, -1)} - {rank})
