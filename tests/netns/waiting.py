"""Waits for what is seen on the network, not for time to pass."""

from __future__ import annotations

import time
from collections.abc import Callable

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
