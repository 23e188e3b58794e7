"""What this process has moved, how fast, and whom it waited for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypedDict

from mccl_core._runtime import current_runtime

if TYPE_CHECKING:
    from mccl_core._C import OpCounters
    from mccl_core._runtime import Runtime

log = logging.getLogger("mccl")

ONLY = "only"
"""Stands for the algorithm of ops that have no choice."""


class AlgorithmMetrics(TypedDict):
    """One kind of op by one algorithm, over all groups of this process. Times are in seconds.

    An op is under way from its call (on a device: from when its tensor has been computed) until its last byte has
    been sent and received.
    """

    count: int
    """Ops that ended well."""
    failed: int
    """Ops that ended with an error."""
    bytes: int
    """Of the callers' tensors; of all-gather, reduce-scatter, gather and scatter: of one rank's tensor."""
    sent_bytes: int
    """Payload that this rank sent for them, as it travelled: compression makes it less (docs/compression.md)."""
    bus_bytes: int
    """What these ops need of a rank's link, each way: for an all-reduce 2(N-1)/N of its bytes, as in nccl-tests."""
    busy_s: float
    """Time in which at least one of these ops was under way: ops that overlap count once."""
    busbw_GBps: float
    """`bus_bytes` per `busy_s`, in GB/s. Time spent waiting for a late peer lowers it."""
    queue_s: float
    """Sum of the times that ops with bytes to send waited for their first to go out, behind those of other ops."""
    parked_bytes: int
    """Received before this rank could use them: it had not made the call yet, or an earlier step was not done."""
    wait_s: dict[str, float]
    """By peer: sum of the times that ops waited for its first bytes.

    An op's wait begins with the op. Each peer whose first bytes come ends it, is charged for it, and a new one begins;
    bytes that were there before the call cost nothing. So a peer that calls late stands out on the ranks that receive
    from it, and one that is only slow shows in `busbw_GBps`.
    """


class OpMetrics(TypedDict):
    """One kind of op, over all groups of this process."""

    count: int
    """Ops that ended well."""
    bytes: int
    """As `AlgorithmMetrics.bytes`."""
    sent_bytes: int
    """As `AlgorithmMetrics.sent_bytes`."""
    algorithms: dict[str, AlgorithmMetrics]
    """By algorithm, those that were used; "only" for kinds that have one."""


class Metrics(TypedDict):
    """What `get_metrics` returns."""

    ops: dict[str, OpMetrics]
    """By kind of op: `all_reduce`, `broadcast`, `reduce`, `all_gather`, `reduce_scatter`, `gather`, `scatter`,
    `all_to_all`, `barrier`, `send/recv`."""
    parked_bytes: int
    """Held now: received and not yet of use."""


def get_metrics() -> Metrics:
    """Counts since the first group was made or `reset_metrics()`; all empty before the first group.

    Does not wait for ops in flight, which count once they have ended; may be called from any thread. A peer is called
    `rank 1 on mac-2`, by its rank in the first group that it shared with this process.
    """
    runtime = current_runtime()
    if runtime is None:
        return {"ops": {}, "parked_bytes": 0}
    ops = {kind: _op(used, runtime) for kind, used in runtime.engine.metrics().items()}
    return {"ops": ops, "parked_bytes": runtime.engine.parked_nbytes()}


def reset_metrics() -> None:
    """Sets all counts to zero. Ops in flight count when they end, with the time from here on."""
    runtime = current_runtime()
    if runtime is not None:
        runtime.engine.reset_metrics()


def log_metrics(level: int = logging.WARNING) -> None:
    """Writes a line for each kind of op and algorithm to the logger `mccl`.

    Args:
        level: of the message. By default it is seen without any set-up of logging, and where MCCL_LOG_LEVEL has its
            default.
    """
    metrics = get_metrics()
    lines = [
        _line(f"{kind}, {name}" if name != ONLY else kind, entry)
        for kind, op in metrics["ops"].items()
        for name, entry in op["algorithms"].items()
    ]
    log.log(level, "mccl: %s", "\n  ".join(["moved by this process:", *lines]) if lines else "nothing was moved yet")


def _op(used: list[OpCounters], runtime: Runtime) -> OpMetrics:
    algorithms = {entry["algorithm"] or ONLY: _algorithm(entry, runtime) for entry in used}
    return {
        "count": sum(entry["count"] for entry in used),
        "bytes": sum(entry["nbytes"] for entry in used),
        "sent_bytes": sum(entry["sent_nbytes"] for entry in used),
        "algorithms": algorithms,
    }


def _algorithm(entry: OpCounters, runtime: Runtime) -> AlgorithmMetrics:
    busy_ns = entry["busy_ns"]
    return {
        "count": entry["count"],
        "failed": entry["failed"],
        "bytes": entry["nbytes"],
        "sent_bytes": entry["sent_nbytes"],
        "bus_bytes": entry["bus_nbytes"],
        "busy_s": busy_ns / 1e9,
        "busbw_GBps": entry["bus_nbytes"] / busy_ns if busy_ns else 0.0,
        "queue_s": entry["queued_ns"] / 1e9,
        "parked_bytes": entry["parked_nbytes"],
        "wait_s": {runtime.name_of(process): ns / 1e9 for process, ns in entry["waited_ns"].items()},
    }


def _line(name: str, entry: AlgorithmMetrics) -> str:
    failed = f", {entry['failed']:,} failed" if entry["failed"] else ""
    waits = sorted(entry["wait_s"].items(), key=lambda item: -item[1])
    longest = f", waited {waits[0][1]:.3f} s for {waits[0][0]}" if waits else ""
    return (
        f"{name}: {entry['count']:,} ops{failed}, {entry['bytes'] / 1e6:,.1f} MB, {entry['busbw_GBps']:.3f} GB/s, "
        f"queued {entry['queue_s']:.3f} s{longest}, {entry['parked_bytes'] / 1e6:,.1f} MB parked"
    )
