"""Events in words: what a person reads of a job's life, and the summary at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from mccl_ray import events, local_run
from mccl_ray.events import Event
from mccl_ray.journal import FINISHED, describe_death

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def describe(event: Event) -> list[str]:
    """The lines to show for an event; none for one that only carries numbers."""
    kind = event["event"]
    if kind == events.OUTPUT:
        return [event["text"]]
    if kind in (local_run.FLEET, events.WAITING):
        return [event["message"]]
    if kind == "submitted":
        return [f"submitted {event['job']} to {event['address']}"]
    if kind == events.RUN:
        plural = "" if event["workers"] == 1 else "s"
        return [f"run {event['run']}: {event['script']} on {event['workers']} worker{plural}"]
    if kind == events.WORKERS:
        return [f"  rank {w['rank']} → {w['host']} ({w['ip']})" for w in event["workers"]]
    if kind == "validation" and event["rank"] == 0:
        return [f"epoch {event['epoch']}, step {event['step']}: {metrics_text(event['metrics'])}"]
    if kind == "checkpoint" and event["rank"] == 0:
        return [f"checkpoint at step {event['step']}"]
    if kind == events.DIED:
        when = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        return [f"{when} lost {describe_death(event)}"]
    if kind == events.RESTARTING:
        return [_restart(event)]
    return []


def summary(result: Event) -> list[str]:
    """The lines that end a job."""
    if result["status"] != FINISHED:
        lines = [f"{result['status']}: {result['error']}"]
        return lines + [f"  {name:<12}{result[name]}" for name in ("checkpoint", "logs") if result.get(name)]
    rows = [(name, number(value)) for name, value in sorted(result["metrics"].items())]
    rate = result["samples_per_s"]
    rows.append(("throughput", f"{number(rate)} samples/s" if rate is not None else "not measured"))
    rows.append(("workers", ", ".join(f"{w['rank']} {w['host']} ({w['ip']})" for w in result["workers"])))
    rows.append(("all-reduced", all_reduced(result)))
    rows.append(("checkpoint", result["checkpoint"] or "none"))
    rows.append(("logs", result["logs"]))
    count = result["restarts"]
    restarts = f", {count} restart{'' if count == 1 else 's'}" if count else ""
    title = f"finished {result['run']} in {result['duration_s']:.0f} s{restarts}"
    width = max(len(name) for name, _ in rows) + 2
    return ["", title, *(f"  {name:<{width}}{text}" for name, text in rows)]


def all_reduced(result: Mapping[str, Any]) -> str:
    """ "12.3 MB in 230 all-reduces a worker"."""
    nbytes = result["bytes_all_reduced"]
    if nbytes is None:
        return "not measured (no process group of mccl)"
    return f"{nbytes_text(nbytes)} in {result['all_reduces']} all-reduces a worker"


def nbytes_text(nbytes: float) -> str:
    """A number of bytes with a decimal unit."""
    for unit in _UNITS:
        if nbytes < 1000 or unit == _UNITS[-1]:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


def number(value: float) -> str:
    """A number with four significant digits, thousands separated."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """ "val_acc 0.9722  val_loss 0.1"."""
    return "  ".join(f"{name} {number(value)}" for name, value in sorted(metrics.items()))


def _restart(event: Event) -> str:
    step = event["checkpoint_step"]
    where = "the beginning" if step is None else f"the checkpoint at step {step}"
    return f"restarting from {where} (failure {event['failures']} of at most {event['max_failures']})"
