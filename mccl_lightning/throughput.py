"""How many samples a second this rank trains on, validation left out."""

from collections.abc import Callable


class Throughput:
    """Counts samples and the seconds in which the clock was not paused.

    A batch of unknown size (None) makes all rates since then unknown.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._elapsed_s = 0.0
        self._running_since: float | None = None
        self._samples: int | None = 0
        self._mark_s = 0.0
        self._mark_samples: int | None = 0

    @property
    def samples(self) -> int | None:
        return self._samples

    def run(self) -> None:
        """Starts the clock, or goes on after a pause."""
        if self._running_since is None:
            self._running_since = self._clock()

    def pause(self) -> None:
        self._elapsed_s = self.elapsed_s()
        self._running_since = None

    def elapsed_s(self) -> float:
        running = 0.0 if self._running_since is None else self._clock() - self._running_since
        return self._elapsed_s + running

    def add(self, samples: int | None) -> None:
        self._samples = None if samples is None or self._samples is None else self._samples + samples

    def rate(self) -> float | None:
        """Samples a second since the start; None where unknown."""
        return _rate(self._samples, 0, self.elapsed_s())

    def since_mark_s(self) -> float:
        return self.elapsed_s() - self._mark_s

    def mark(self) -> float | None:
        """Samples a second since the last call, or since the start; None where unknown."""
        now = self.elapsed_s()
        rate = _rate(self._samples, self._mark_samples, now - self._mark_s)
        self._mark_s, self._mark_samples = now, self._samples
        return rate


def _rate(samples: int | None, before: int | None, seconds: float) -> float | None:
    return None if samples is None or before is None or seconds <= 0 else (samples - before) / seconds
