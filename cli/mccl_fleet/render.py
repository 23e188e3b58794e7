"""Shows a job's events: a progress bar on a terminal, plain lines elsewhere, JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from mccl_fleet.phrases import describe, number, summary
from mccl_ray import events, progress
from mccl_ray.events import Event

_STEP_INTERVAL_S = 5.0


class Renderer(Protocol):
    """Shows events from the first to the result."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *unused: object) -> None: ...
    def show(self, event: Event) -> None: ...


def choose_renderer(*, as_json: bool) -> Renderer:
    """The renderer for this program's stdout."""
    if as_json:
        return JsonRenderer()
    return BarRenderer() if sys.stdout.isatty() else PlainRenderer()


class JsonRenderer:
    """One JSON object a line; numbers that JSON lacks (NaN) become null."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        pass

    def show(self, event: Event) -> None:
        print(json.dumps(_finite(event), default=str, allow_nan=False), flush=True)


class PlainRenderer:
    """Lines, of which progress takes one every few seconds."""

    def __init__(self) -> None:
        self._progress = progress.Progress()
        self._last_step = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        pass

    def show(self, event: Event) -> None:
        self._progress.add(event)
        if event["event"] == "step":
            if event["rank"] == 0 and time.monotonic() - self._last_step >= _STEP_INTERVAL_S:
                self._last_step = time.monotonic()
                print(_step_line(self._progress), flush=True)
            return
        for line in _lines(event):
            print(line, flush=True)


class BarRenderer:
    """A bar at the bottom of the terminal, all else above it."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._progress = progress.Progress()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, detail="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._bar.stop()

    def show(self, event: Event) -> None:
        self._progress.add(event)
        if event["event"] == events.RESULT:
            self._bar.stop()
        elif event["event"] in ("started", "step"):
            state = self._progress
            self._bar.update(
                self._task,
                description="training",
                total=state.total_steps,
                completed=state.step or 0,
                detail=_step_line(state),
            )
            return
        elif event["event"] in (events.RESTARTING, events.WORKERS):
            self._bar.reset(self._task, total=None, description="starting", detail="")
        style = "dim" if event["event"] == events.OUTPUT else None
        for line in _lines(event):
            self._console.print(line, style=style, markup=False, soft_wrap=True)


def _lines(event: Event) -> list[str]:
    return summary(event) if event["event"] == events.RESULT else describe(event)


def _step_line(state: progress.Progress) -> str:
    of_total = f"/{state.total_steps}" if state.total_steps else ""
    parts = [f"step {state.step}{of_total}", f"epoch {state.epoch}"]
    if state.loss is not None:
        parts.append(f"loss {number(state.loss)}")
    if state.samples_per_s is not None:
        parts.append(f"{number(state.samples_per_s)} samples/s on {state.workers}")
    return "  ".join(parts)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0.0:
        return None
    return value
