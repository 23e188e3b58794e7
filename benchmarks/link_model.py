"""The simulator as a model of a link with two unknowns, latency and goodput; and their fit to measured rows.

A row is one of benchmarks/shaped.py or allreduce.py: `world`, `bytes`, `mccl_ms`; `in_flight` (1 where it is left
out), which all-reduces of that size at once took that time together; `link_profile` (its fields or its name;
`ethernet-10g` where it is left out), by which the measured groups chose their algorithm; and `burst_nbytes` of the
shaper (0 where it is left out).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mccl_core import explain, links
from mccl_core.config import CoreConfig
from mccl_core.links import LinkProfile
from mccl_core.simulation import simulate_all_reduces

Row = dict[str, Any]

CONFIG = CoreConfig.model_validate({})


@dataclass(frozen=True)
class LinkModel:
    """Hockney's two parameters."""

    alpha_s: float
    goodput_bytes_per_s: float

    def predict_ms(self, row: Row) -> float:
        """What the row's time should be, in ms, with the algorithm and the chunks that its group has chosen."""
        nbytes, world, in_flight = int(row["bytes"]), int(row["world"]), int(row.get("in_flight", 1))
        stated = row.get("link_profile", "ethernet-10g")
        chosen_by = LinkProfile(**stated) if isinstance(stated, dict) else links.load(stated)
        plan = explain("all_reduce", nbytes, world, profile=chosen_by, config=CONFIG).chosen
        link = LinkProfile(latency_us=self.alpha_s * 1e6, step_us=0, goodput_GBps=self.goodput_bytes_per_s / 1e9)
        burst_nbytes = int(row.get("burst_nbytes", 0))
        result = simulate_all_reduces(
            link, plan, world, [nbytes] * in_flight, [0.0] * in_flight, burst_nbytes=burst_nbytes
        )
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
