"""The driver's memory of a run: writes `events.jsonl`, prints events, and sums them up in the result."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mccl_ray import events
from mccl_ray.events import Event

FINISHED = "finished"
FAILED = "failed"


class Journal:
    """Takes the events of one run in the order of their arrival; one thread at a time may call it."""

    def __init__(self, path: Path, *, run: str, max_failures: int, emit: Callable[[Event], None]) -> None:
        self._path = path
        self._run = run
        self._max_failures = max_failures
        self._emit = emit
        self._begin = time.monotonic()
        self._workers: dict[int, dict[str, Any]] = {}
        self._deaths: list[Event] = []
        self._finished: dict[int, Event] = {}
        self._rates: dict[int, float] = {}
        self._metrics: dict[str, float] = {}
        self._step: int | None = None
        self._checkpoint: Event | None = None
        self._restarts = 0

    def open(self) -> None:
        """Creates the run's folder and an empty `events.jsonl`.

        Raises:
            OSError: the storage cannot be written.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        self._file = (self._path / "events.jsonl").open("a", encoding="utf-8")

    def record(self, event: Event) -> None:
        """Completes an event with the worker's host, remembers, writes and prints it."""
        event = {"event": event["event"], "time": event.get("time", time.time()), **event}
        worker = self._workers.get(event.get("rank", -1))
        if worker:
            event["host"] = worker["host"]
        if remember := getattr(self, f"_on_{event['event']}", None):
            event = remember(event)
        if event["event"] != events.OUTPUT:
            self._file.write(json.dumps(event, default=str) + "\n")
            self._file.flush()
        self._emit(event)

    def finish(self, *, error: str | None, checkpoint: str | None) -> Event:
        """Writes `result.json`, records the result as the last event, and returns it."""
        result = self._result(error, checkpoint)
        text = json.dumps(result, indent=2, default=str)
        (self._path / "result.json").write_text(text + "\n", encoding="utf-8")
        self.record(result)
        self._file.close()
        return result

    def cause(self) -> str | None:
        """The death behind the others, in one line: a lost worker or a signal rather than an exit code."""
        if not self._deaths:
            return None
        first = min(self._deaths, key=_collateral)
        return describe_death(first)

    def _on_workers(self, event: Event) -> Event:
        self._workers = {worker["rank"]: worker for worker in event["workers"]}
        self._deaths = []
        self._finished = {}
        self._rates = {}
        return event

    def _on_worker_died(self, event: Event) -> Event:
        self._deaths.append(event)
        return event

    def _on_restarting(self, event: Event) -> Event:
        self._restarts += 1
        checkpoint = self._checkpoint["step"] if self._checkpoint else None
        return {
            **event,
            "failures": self._restarts,
            "max_failures": self._max_failures,
            "cause": self.cause(),
            "checkpoint_step": checkpoint,
        }

    def _on_step(self, event: Event) -> Event:
        self._step = max(self._step or 0, event["step"])
        if event.get("samples_per_s") is not None:
            self._rates[event["rank"]] = event["samples_per_s"]
        return event

    def _on_validation(self, event: Event) -> Event:
        self._metrics = {**self._metrics, **event["metrics"]}
        return event

    def _on_checkpoint(self, event: Event) -> Event:
        self._checkpoint = event
        return event

    def _on_finished(self, event: Event) -> Event:
        self._finished[event["rank"]] = event
        self._step = event["step"]
        if event["rank"] == 0:
            self._metrics = {**self._metrics, **event["metrics"]}
        if event.get("samples_per_s") is not None:
            self._rates[event["rank"]] = event["samples_per_s"]
        return event

    def _result(self, error: str | None, checkpoint: str | None) -> Event:
        rank_0 = self._finished.get(0, {})
        rates = [rate for rate in self._rates.values() if math.isfinite(rate)]
        return {
            "event": events.RESULT,
            "time": time.time(),
            "run": self._run,
            "status": FAILED if error else FINISHED,
            "error": error,
            "metrics": self._metrics,
            "steps": self._step,
            "samples_per_s": sum(rates) if rates else None,
            "workers": [self._workers[rank] for rank in sorted(self._workers)],
            "bytes_all_reduced": rank_0.get("bytes_all_reduced"),
            "all_reduces": rank_0.get("all_reduces"),
            "checkpoint": checkpoint,
            "path": str(self._path),
            "logs": str(self._path / "logs"),
            "restarts": self._restarts,
            "duration_s": time.monotonic() - self._begin,
        }


def describe_death(event: Event) -> str:
    """ "rank 1 on mac-2 (10.0.0.2): script killed by SIGKILL: …", in one line."""
    where = f"rank {event.get('rank')} on {event.get('host')} ({event.get('ip')})"
    how = f"script ended: {event['how']}" if event["what"] == "script" else event["how"]
    return f"{where}: {how}" + (f": {event['message']}" if event.get("message") else "")


def _collateral(event: Event) -> int:
    """0 for a lost worker, 1 for a killed script, 2 for one that gave up, as those do that lose a peer."""
    if event["what"] == "worker":
        return 0
    return 1 if event["how"].startswith("killed") else 2
