"""How far a run has come, from its events."""

from __future__ import annotations

from typing import Any

from mccl_ray.events import RESTARTING, WORKERS, Event


class Progress:
    """Folds events into the few numbers that a person watches."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.total_steps: int | None = None
        self.epoch: int | None = None
        self.loss: float | None = None
        self.workers = 0
        self.restarts = 0
        self.metrics: dict[str, float] = {}
        self._rates: dict[int, float] = {}

    @property
    def samples_per_s(self) -> float | None:
        """The sum over all workers of their latest rates."""
        return sum(self._rates.values()) if self._rates else None

    def add(self, event: Event) -> None:
        """Takes the next event."""
        kind = event["event"]
        if kind == WORKERS:
            self.workers = len(event["workers"])
            self._rates = {}
        elif kind == RESTARTING:
            self.restarts += 1
        elif kind == "started":
            self.total_steps = event["total_steps"]
        elif kind == "step":
            if event["samples_per_s"] is not None:
                self._rates[event["rank"]] = event["samples_per_s"]
            if event["rank"] == 0:
                self.step, self.epoch, self.loss = event["step"], event["epoch"], event["loss"]
        elif kind in ("validation", "finished") and event["rank"] == 0:
            self.metrics = {**self.metrics, **event["metrics"]}
            self.step = event["step"]

    def fields(self) -> dict[str, Any]:
        """The numbers by name."""
        return {
            "workers": self.workers,
            "step": self.step,
            "total_steps": self.total_steps,
            "epoch": self.epoch,
            "loss": self.loss,
            "samples_per_s": self.samples_per_s,
            "metrics": self.metrics,
            "restarts": self.restarts,
        }
