"""The board: an actor beside the driver; workers and controller post events, workers get the secret."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mccl_ray.events import Event


class Board:
    """A queue of events with one reader, the driver.

    The secret travels in a method's result, so that it appears in no runtime environment, log or process
    list.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    async def post(self, event: Event) -> None:
        self._events.put_nowait(event)

    async def take(self, timeout_s: float) -> list[Event]:
        """Waits for the next event and returns it with all that have arrived; empty after `timeout_s`."""
        try:
            events = [await asyncio.wait_for(self._events.get(), timeout_s)]
        except TimeoutError:
            return []
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    async def secret(self) -> bytes:
        return self._secret


def start_board(secret: bytes) -> Any:
    """Starts a board on this process's node and returns its handle; it ends with the driver."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Board).options(num_cpus=0, scheduling_strategy=here).remote(secret)
