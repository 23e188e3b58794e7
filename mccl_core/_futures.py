"""Futures whose callbacks may communicate.

A callback runs when its future completes, on the thread that completes it, or at once if that has happened already; so
each rank runs it at another point between the other calls of the program. What it starts must meet what the same
callback starts on the other ranks all the same: the core names ops that are started inside a callback by the place of
that callback in the program, not by the order of calls. These futures tell it which callback is running.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mccl_core._C import InCallback, Work, child_place, forward_future

Place = tuple[int, int]


class OrderedFuture(torch.futures.Future):
    """A torch future; ops that its callbacks start match between ranks whenever the callbacks run."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place
        self._callbacks = 0

    def then(self, callback: Callable[[torch.futures.Future], Any]) -> OrderedFuture:
        """As `torch.futures.Future.then`; a callback's place is the order of these calls, which ranks share."""
        place = self._next_place()
        child = OrderedFuture(place)

        def run(_: Any) -> Any:
            with InCallback(*place):
                return callback(self)

        forward_future(super().then(run), child)
        return child

    def add_done_callback(self, callback: Callable[[torch.futures.Future], None]) -> None:
        """As `torch.futures.Future.add_done_callback`."""
        place = self._next_place()

        def run(_: Any) -> None:
            with InCallback(*place):
                callback(self)

        super().add_done_callback(run)

    def _next_place(self) -> Place:
        self._callbacks += 1
        return child_place(*self._place, self._callbacks)


def future_of(work: Work) -> torch.futures.Future:
    """The future of one op; called by `Work.get_future()`."""
    place = work._callback_place()
    plain = work._plain_future()
    if place is None:
        return plain
    future = OrderedFuture(place)
    forward_future(plain, future)
    return future
