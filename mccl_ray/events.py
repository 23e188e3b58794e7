"""The events of a run: one JSON object each, in `events.jsonl`, on the driver's output and in `--json`.

Each has `event` (its kind), `time` (Unix seconds, the driver's clock) and, where it concerns a worker,
`rank`, `host` and `ip`. Besides the kinds below, the script's own events (mccl_lightning.contract) appear
under their names.
"""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]

RUN = "run"
"""The run begins: run, name, script, workers, path, logs."""
WAITING = "waiting"
"""Not enough Macs are free yet: message."""
WORKERS = "workers"
"""A group of workers was placed: attempt, workers (a list of rank, host, ip, pid)."""
OUTPUT = "output"
"""A line that rank 0's script printed: text. Not in events.jsonl; it is in the log file."""
DIED = "worker_died"
"""A worker was lost: what (script, worker), how, message, tail (the script's last lines)."""
RESTARTING = "restarting"
"""The job restarts: failures, max_failures, cause, checkpoint (None: from the beginning)."""
RESULT = "result"
"""The last event, as in result.json."""

_PREFIX = "@mccl-fleet "


def to_line(event: Event) -> str:
    """The event as the driver prints it; a non-finite number is written as Python's json writes it."""
    return _PREFIX + json.dumps(event, default=str)


def from_line(line: str) -> Event | None:
    """The event that `to_line` wrote, or None where the line is ordinary output."""
    if not line.startswith(_PREFIX):
        return None
    try:
        event = json.loads(line.removeprefix(_PREFIX))
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
