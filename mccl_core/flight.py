"""The flight record: the latest ops of this process, for whoever has to find out why a job stands still."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TypedDict

from mccl_core._runtime import current_runtime

log = logging.getLogger("mccl")
_names: dict[int, str] = {}


class FlightEntry(TypedDict):
    """One op."""

    group: str
    """torch's name of its group."""
    ticket: int
    """Its number in the group; of a message between two ranks, by pair, direction and tag. 0 for a receive from any
    source that has no message yet."""
    op: str
    """Its kind: `all_reduce`, `broadcast` and so on."""
    call: str
    """What all ranks must agree on."""
    nbytes: int
    """Bytes of the caller's tensors."""
    state: str
    """`in flight`, `done` or `failed`."""
    peer: int | None
    """The rank that it waits for, or was waiting for when it failed; None where there is none in particular."""
    age_ms: float
    """Milliseconds since the call."""
    duration_ms: float | None
    """Milliseconds from the call to its end; None while it is in flight."""


def flight_record() -> list[FlightEntry]:
    """Returns the latest MCCL_FLIGHT_RECORD_OPS ops of this process, the oldest first; empty before the first group.

    Does not block: it can be called by a signal handler or a watchdog thread while another thread waits for an op.
    """
    runtime = current_runtime()
    if runtime is None:
        return []
    record = runtime.engine.flight_record()
    for entry in record:
        entry["group"] = name_of(int(entry["group"]))
    return record


def name_group(group_id: int, name: str) -> None:
    """What the record calls a group: torch's name of it, where it has one."""
    _names[group_id] = name or f"group {group_id:x}"


def name_of(group_id: int) -> str:
    """What the record calls a group."""
    return _names.get(group_id, f"group {group_id:x}")


def dump(target: str | None, *, group: int, error: str, rank: int) -> None:
    """Writes the record to a file, or to the log where `target` is `log`; does nothing where it is None."""
    if target is None:
        return
    report = {"group": name_of(group), "rank": rank, "pid": os.getpid(), "error": error, "ops": flight_record()}
    text = json.dumps(report, indent=1)
    if target == "log":
        log.error("mccl: flight record: %s", text)
        return
    path = Path(target.replace("{rank}", str(rank)).replace("{pid}", str(os.getpid())))
    try:
        path.write_text(text + "\n")
    except OSError as failure:
        log.error("mccl: cannot write the flight record to %s (MCCL_FLIGHT_RECORD_FILE): %s", path, failure.strerror)
