"""The simulator as a model of a link with two unknowns, latency and goodput; and their fit to measured rows.

A row is one of benchmarks/shaped.py or allreduce.py: `world`, `bytes`, `mccl_ms`, and `in_flight` (1 where it is left
out), which all-reduces of that size at once took that time together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mccl_core import _C
from mccl_core.config import CoreConfig

Row = dict[str, Any]

SEGMENT_NBYTES: int = CoreConfig.model_fields["segment_nbytes"].default
FORWARD_NBYTES = 0  # what forwarding costs is part of alpha
RING_MIN_NBYTES: int = CoreConfig.model_fields["ring_min_nbytes"].default
CREDIT_NBYTES: int = CoreConfig.model_fields["credit_nbytes"].default


@dataclass(frozen=True)
class LinkModel:
    """Hockney's two parameters, and the processor's cost of a segment."""

    alpha_s: float
    goodput_bytes_per_s: float
    segment_cost_s: float = 0.0

    def simulate(
        self,
        algorithm: str,
        world: int,
        nbytes: list[int],
        ready_s: list[float],
        *,
        max_in_flight: int = 0,
        groups: Sequence[int] = (),
    ) -> _C.Simulation:
        """All-reduces of `nbytes` each, started at `ready_s`. `groups` is what the algorithm knows of switches.

        Raises:
            RuntimeError: the ranks would wait for each other for ever.
        """
        result = _C.simulate(
            "all_reduce",
            algorithm,
            world=world,
            nbytes=nbytes,
            ready_s=ready_s,
            alpha_s=self.alpha_s,
            goodput_bytes_per_s=self.goodput_bytes_per_s,
            segment_nbytes=SEGMENT_NBYTES,
            forward_nbytes=FORWARD_NBYTES,
            credit_nbytes=CREDIT_NBYTES,
            segment_cost_s=self.segment_cost_s,
            groups=list(groups),
            # No switch is narrower than what is plugged into it.
            uplink_goodput_bytes_per_s=self.goodput_bytes_per_s * world,
            max_in_flight=max_in_flight,
        )
        if result["deadlock"] is not None:
            raise RuntimeError(f"{algorithm} with {world} ranks: {result['deadlock']}")
        return result

    def predict_ms(self, row: Row) -> float:
        """What the row's time should be, in ms, with the algorithm that its size gets by default."""
        nbytes, in_flight = int(row["bytes"]), int(row.get("in_flight", 1))
        algorithm = "ring" if nbytes >= RING_MIN_NBYTES else "recursive_doubling"
        result = self.simulate(algorithm, int(row["world"]), [nbytes] * in_flight, [0.0] * in_flight)
        return result["last_finish_s"] * 1e3


def relative_error(model: LinkModel, row: Row) -> float:
    """(predicted - measured) / measured."""
    return model.predict_ms(row) / float(row["mccl_ms"]) - 1


def descend(cost: Callable[[list[float]], float], start: list[float], step: float, smallest: float) -> list[float]:
    """The lowest point that steps along the axes and diagonals reach, halved where none leads down.

    Needs no derivatives: a simulated time has kinks, where latency takes over from bandwidth.
    """
    ways = [(0, 1), (1, 0), (0, -1), (-1, 0), (1, -1), (-1, 1), (1, 1), (-1, -1)]
    at, lowest = start, cost(start)
    while step >= smallest:
        for way in ways:
            candidate = [value + step * sign for value, sign in zip(at, way, strict=True)]
            value = cost(candidate)
            if value < lowest:
                at, lowest = candidate, value
                break
        else:
            step /= 2
    return at


def fit(rows: list[Row]) -> LinkModel:
    """Latency and goodput with the least sum of squared relative errors over the rows, which are of one world.

    Raises:
        ValueError: no rows, or rows of several worlds, or of one size, which cannot tell the two apart.
    """
    worlds = sorted({int(row["world"]) for row in rows})
    if len(worlds) != 1:
        raise ValueError(f"a fit needs rows of one world, got worlds {worlds}: choose one with --world")
    if worlds[0] < 2:
        raise ValueError("a fit needs rows of at least two ranks: one has nobody to exchange with")
    if len({int(row["bytes"]) for row in rows}) < 2:
        raise ValueError("a fit needs at least two sizes: with one, latency and bandwidth cannot be told apart")
    world = worlds[0]
    shortest_s = min(float(row["mccl_ms"]) for row in rows) / 1e3
    largest = max(rows, key=lambda row: int(row["bytes"]))
    wire_nbytes = 2 * (world - 1) / world * int(largest["bytes"]) * int(largest.get("in_flight", 1))
    start = [math.log(shortest_s / math.ceil(math.log2(world))), math.log(wire_nbytes / largest["mccl_ms"] * 1e3)]

    def model(at: list[float]) -> LinkModel:
        return LinkModel(math.exp(at[0]), math.exp(at[1]))

    def cost(at: list[float]) -> float:
        return sum(relative_error(model(at), row) ** 2 for row in rows)

    return model(descend(cost, start, 0.5, 0.0005))
