"""Environment variables that are not simply MCCL_<FIELD> of `CoreConfig`: one line each.

The configuration, its warnings and docs/environment.md are made from here and from the fields.
"""

from __future__ import annotations

from collections.abc import Mapping

ALIASES: Mapping[str, str] = {
    "DDP_BUCKET_MB": "ddp_bucket_mb",
    "MCCL_CHUNK_BYTES": "segment_nbytes",
    "MCCL_SMALL_MSG_THRESHOLD": "recursive_doubling_max_nbytes",
    "MCCL_SOCK_BUFSIZE": "socket_buffer_nbytes",
    "MCCL_WATCHDOG_TIMEOUT_MS": "op_timeout_ms",
}
"""Other names of variables → fields of `CoreConfig`; MCCL_<FIELD> wins where both are set."""

REPLACED: Mapping[str, str] = {
    "MCCL_EVENT_SYNC": "a device and the engine have one way to wait for each other (docs/hand-off.md)",
    "MCCL_FAST_MATH": "sums are made by the CPU, exactly in order: there is nothing to relax",
    "MCCL_FP32_CPU_REDUCE": "sums are always made by the CPU, as bytes arrive",
    "MCCL_GPU_THRESHOLD": "sums are made by the CPU, as bytes arrive, at every size",
    "MCCL_MAX_QUEUE_DEPTH": "any number of ops may be in flight; MCCL_CREDIT_NBYTES bounds what a peer has to park",
    "MCCL_OVERLAP_COMM": "communication always overlaps with what the caller computes",
    "MCCL_PIPELINE_DEPTH": "a ring passes bytes on as they arrive; for the circulant set MCCL_CHUNK_NBYTES",
    "MCCL_RING_ALGO": "there is one ring; MCCL_ALLREDUCE_ALGO names another algorithm",
    "MCCL_SHADER_PATH": "there are no shaders to load",
    "MCCL_SYNC_MODE": "a device and the engine have one way to wait for each other (docs/hand-off.md)",
    "MCCL_TCP_LOWAT": "a socket is sent what it takes; MCCL_SOCKET_BUFFER_NBYTES sizes its buffer",
    "MCCL_UNIFIED_COLLECTIVE": "all collectives are run by one engine",
}
"""Variables that mean nothing here → what there is instead. The name of a field does not belong here."""

JOB_VARIABLES = frozenset(
    {
        "MCCL_ARGS",
        "MCCL_CHECKPOINT_EVERY_N_EPOCHS",
        "MCCL_CHECKPOINT_EVERY_N_STEPS",
        "MCCL_CHECKPOINT_KEEP",
        "MCCL_ENV",
        "MCCL_MAX_FAILURES",
        "MCCL_NAME",
        "MCCL_POOL",
        "MCCL_PROGRESS_INTERVAL_S",
        "MCCL_SCRIPT",
        "MCCL_STORAGE",
        "MCCL_WORKDIR",
        "MCCL_WORKERS",
    }
)
"""What `mccl-fleet submit` reads beside the core's: a script on the fleet may see them."""

FLEET = "MCCL_FLEET"  # this, and what begins with it and a "_": between a fleet's worker and its script
"""Begins the names between the command, a worker and its script."""
