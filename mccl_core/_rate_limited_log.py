"""A log that strangers cannot fill: one line an interval, with the number of those that were left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class RateLimitedLog:
    """Writes a warning at most once in `interval_s` seconds. For one thread."""

    def __init__(
        self, logger: logging.Logger, *, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._next_at = -float("inf")
        self._left_out = 0
        self._last = ""

    def warn(self, text: str) -> None:
        """Logs `text`, or counts it where the last line is too recent."""
        self._last = text
        self._left_out += 1
        self.flush()

    def due_at(self) -> float | None:
        """When `flush` would write what was left out, on the clock; None where nothing was."""
        return self._next_at if self._left_out else None

    def flush(self, *, now: bool = False) -> None:
        """Logs what was left out if the interval has passed, or `now`."""
        if not self._left_out or not (now or self._clock() >= self._next_at):
            return
        more = f" (and {self._left_out - 1} more like it before)" if self._left_out > 1 else ""
        self._left_out = 0
        self._next_at = self._clock() + self._interval_s
        self._logger.warning("mccl: %s%s", self._last, more)
