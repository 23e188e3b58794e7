"""What this process has moved."""

from __future__ import annotations

from typing import TypedDict

from mccl_core._runtime import current_runtime


class OpMetrics(TypedDict):
    """One kind of op, over all groups of this process: ops that ended well, and the bytes of the callers' tensors.

    `sent_bytes` is what this rank sent for them, as they travelled (docs/compression.md), without frames' headers.
    """

    count: int
    bytes: int
    sent_bytes: int


class Metrics(TypedDict):
    """`ops` maps an op's name (`all_reduce`, `broadcast`, …) to its counts; `parked_bytes` were received early."""

    ops: dict[str, OpMetrics]
    parked_bytes: int


def get_metrics() -> Metrics:
    """Returns the counts since the engine started or `reset_metrics()`; all empty before the first group."""
    runtime = current_runtime()
    if runtime is None:
        return {"ops": {}, "parked_bytes": 0}
    return {"ops": runtime.engine.counters(), "parked_bytes": runtime.engine.parked_nbytes()}


def reset_metrics() -> None:
    """Sets all counts to zero."""
    runtime = current_runtime()
    if runtime is not None:
        runtime.engine.reset_counters()
