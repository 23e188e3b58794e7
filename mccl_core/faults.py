"""What a program can do about an error: read its fields, keep bad results to itself, go on with those who are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import DistBackendError
from torch.distributed import distributed_c10d as c10d

from mccl_core._runtime import current_runtime
from mccl_core._shrink import Regroup


@dataclass(frozen=True)
class ErrorReport:
    """Why a group failed."""

    kind: str
    """"peer lost", "peer left", "timeout", "aborted", "mismatch", "protocol error", "system error" or "excluded"."""
    op: str
    """The op that found it, as `all_reduce`; empty where none was in flight."""
    ticket: int
    """That op's number in its group, from 1 on; 0 where none was in flight."""
    rank: int
    """This process's rank in the group."""
    peer: int
    """The rank that is to blame; -1 where there is none."""
    peer_host: str
    """That rank's host; empty where there is none."""
    errno: int
    """The system's error number; 0 where there is none."""
    detail: str
    """What happened, as a clause whose subject is `peer`, or the group where there is none."""
    advice: str
    """What to do."""
    message: str
    """The text of the DistBackendError."""


def last_error() -> ErrorReport | None:
    """Why the group of this process that failed last did; None where none has. Does not block."""
    runtime = current_runtime()
    fields = None if runtime is None else runtime.engine.last_failure()
    return None if fields is None else ErrorReport(**fields)


def require_healthy() -> None:
    """Returns where no group of this process is in error; call it before results leave the process, as a checkpoint.

    A group that failed counts until it is destroyed or shrunk. Does not block.

    Raises:
        DistBackendError: the group's own error.
    """
    runtime = current_runtime()
    fields = None if runtime is None else runtime.engine.open_failure()
    if fields is not None:
        raise DistBackendError(fields["message"])


def shrink(group: dist.ProcessGroup | None = None, *, ranks_to_exclude: Sequence[int] = ()) -> dist.ProcessGroup:
    """Makes a group of the ranks that are left, numbered in order, after a fault or without one. Blocks.

    All ranks that stay must call it. They agree on whom to exclude: whoever any of them names, and whoever is lost.
    The old group is destroyed. Where it was the default group, so are all other groups, and the new one takes its
    place. Models wrapped in DistributedDataParallel must be wrapped anew.

    Args:
        group: the group to shrink, in error or not; None for the default group.
        ranks_to_exclude: ranks in `group` that have to go; lost ones need not be named.

    Returns:
        The new group; `group` itself where nobody is to be excluded and it is not in error.

    Raises:
        DistBackendError: this rank itself was excluded, or the others did not call it before the group's timeout.
        ValueError: a rank is not in the group, or is this one.
        TypeError: the group's backend is not mccl.
    """
    group = group or c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    if backend.name() != "mccl":
        raise TypeError(f"mccl_core.shrink: the group's backend is {backend.name()!r}, not 'mccl'")
    excluded: list[int] = backend.agree(list(ranks_to_exclude))
    if not excluded:
        require_healthy()
        return group
    return c10d.shrink_group(Regroup.of(backend).prepare(excluded), group)
