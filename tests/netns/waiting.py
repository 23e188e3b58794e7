"""Waits for what is seen on the network, not for time to pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from netns.host import Host

POLL_S = 0.02
LIMIT_S = 60.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Returns once `condition()` holds.

    Raises:
        AssertionError: it did not within a minute; the text says `what` did not happen.
    """
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until, f"{what}: did not happen within {LIMIT_S:g} s"
        time.sleep(POLL_S)


def wait_until_sent(host: Host, nbytes: int, since_nbytes: int) -> None:
    """Returns once the host has sent `nbytes` more than `since_nbytes`."""
    wait_until(lambda: host.sent_nbytes() >= since_nbytes + nbytes, f"{host.name} sends {nbytes} bytes")


def wait_until_silent(hosts: list[Host], polls: int = 25) -> None:
    """Returns once none of the hosts has sent more than a little in `polls` polls in a row."""
    seen: list[int] = []

    def silent() -> bool:
        seen.append(sum(host.sent_nbytes() for host in hosts))
        return len(seen) > polls and seen[-1] - seen[-1 - polls] < 10_000

    wait_until(silent, "all hosts fall silent")


class Lateness:
    """By how much this machine wakes threads late, while in the context: no rank can be blamed for that much."""

    SLEEP_S = 0.01

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        asleep_at = time.monotonic()
        while not self._over.wait(self.SLEEP_S):
            now = time.monotonic()
            self.worst_s = max(self.worst_s, now - asleep_at - self.SLEEP_S)
            asleep_at = now
