"""Measures a link profile: times of all-reduces by each algorithm, and the profile whose formulas fit them best.

The formulas are the planner's own (csrc/op/plan.cpp), so that what is fitted is what is used. Small tensors tell the
latency and the cost of a step, large ones the goodput, and circulant against ring its share of that. A profile is
measured once and stored: a job never measures for itself.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mccl_core.config import KIB, MIB, CoreConfig
from mccl_core.links import ETHERNET_10G, LinkProfile
from mccl_core.planning import Collective, explain

BLOCKS = 7
WARM_COUNT = 3
MAX_COUNT = 1000  # all-reduces of a block
SMALL_NBYTES = (1 * KIB, 16 * KIB, 64 * KIB, 256 * KIB)
LARGE_NBYTES = (1 * MIB, 4 * MIB, 16 * MIB)
ALGORITHM_VARIABLE = "MCCL_ALLREDUCE_ALGO"
CHANNELS_VARIABLE = "MCCL_CHANNELS"
_ALL_REDUCE: Collective = "all_reduce"


@dataclass(frozen=True)
class Point:
    """The time of one all-reduce: of the slowest rank, the median of all blocks' medians."""

    algorithm: str
    """As MCCL_ALLREDUCE_ALGO names it."""
    nbytes: int
    """Of the tensor."""
    ms: float
    """The time."""


@dataclass(frozen=True)
class Tuning:
    """A profile and what it was fitted to."""

    profile: LinkProfile
    """For the file that MCCL_LINK_PROFILE names."""
    world: int
    """Number of ranks that measured."""
    hosts: tuple[str, ...]
    """Of each rank."""
    points: tuple[Point, ...]
    """What was measured."""
    errors: tuple[float, ...]
    """By point: (predicted - measured) / measured."""


def measure(*, seconds: float = 1.0, report: Callable[[str], None] = lambda line: None) -> Tuning:
    """Measures the link between the ranks of the default group. Every rank calls it; it blocks all of them.

    Args:
        seconds: measuring time of one point, of which there are up to twenty; the same on every rank.
        report: called on rank 0 with a line of progress.

    Raises:
        ValueError: there is one rank only.
        SettingsError: an MCCL_* variable cannot be used.
        DistBackendError: a rank failed.
    """
    world = dist.get_world_size()
    if world < 2:
        raise ValueError("a link has two ends: tune with at least two ranks")
    config = CoreConfig.from_environment().model_copy(update={"channels": 1})  # a profile says what one channel does
    groups = {name: _new_group(name) for name in _algorithms(world)}
    try:
        points = _measure_points(groups, _cases(world, config), seconds, report if dist.get_rank() == 0 else None)
    finally:
        for group in groups.values():
            dist.destroy_process_group(group)
    hosts: list[str] = [""] * world
    dist.all_gather_object(hosts, config.host_name)
    profile = fit(points, world, config=config)
    return Tuning(profile, world, tuple(hosts), tuple(points), tuple(_errors(profile, points, world, config)))


def fit(points: Sequence[Point], world: int, *, config: CoreConfig | None = None) -> LinkProfile:
    """The profile with the least sum of squared logarithms of predicted / measured over the points of one world.

    Where circulant was not measured (with two ranks it is the ring), its share is that of `ethernet-10g`.

    Raises:
        ValueError: no points of two sizes by two algorithms, which latency, step and goodput cannot be told from.
    """
    if len({point.nbytes for point in points}) < 2 or len({point.algorithm for point in points}) < 2:
        raise ValueError("a fit needs at least two sizes by two algorithms")
    config = config or CoreConfig.model_validate({})
    with_share = any(point.algorithm == "circulant" for point in points)
    quickest_us = min(point.ms for point in points) * 1e3
    largest = max(points, key=lambda point: point.nbytes)
    goodput = 2 * (world - 1) / world * largest.nbytes / (largest.ms * 1e6)

    def profile_at(at: Sequence[float]) -> LinkProfile:
        latency, step, rate, *share = (math.exp(value) for value in at)
        return LinkProfile(
            latency_us=min(max(latency, 0.01), 1e6),
            step_us=min(max(step, 0.01), 1e6),
            goodput_GBps=min(max(rate, 1e-6), 1e3),
            circulant_share=min(max(share[0], 0.01), 1.0) if share else ETHERNET_10G.circulant_share,
        )

    def residuals(at: Sequence[float]) -> list[float]:
        return [math.log1p(error) for error in _errors(profile_at(at), points, world, config)]

    # The formulas have kinks, where latency takes over from bandwidth, so the descent starts on all sides of them.
    shares = [math.log(0.9)] if with_share else []
    starts = [
        [math.log(quickest_us * latency), math.log(quickest_us * step), math.log(goodput * rate), *shares]
        for latency in (0.1, 0.4, 1.0)
        for step in (0.02, 0.2, 0.5)
        for rate in (1.0, 1.5)
    ]
    lowest = min((_least_squares(residuals, start) for start in starts), key=lambda at: _squared(residuals(at)))
    found = profile_at(lowest).model_dump()
    return LinkProfile.model_validate({name: float(f"{value:.4g}") for name, value in found.items()})


def describe(tuning: Tuning, *, command: str, when: str, version: str) -> str:
    """The profile as YAML, under a comment that says when, where and by what command it was measured."""
    worst = max(tuning.errors, key=abs)
    hosts = ", ".join(dict.fromkeys(tuning.hosts))
    lines = [
        f"# Link profile, measured {when} by mccl-fleet {version}: {' '.join(command.split())}",
        f"# {tuning.world} ranks on {hosts}; torch {torch.__version__}",
        f"# {len(tuning.points)} points; predicted against measured: median error "
        f"{statistics.median(map(abs, tuning.errors)):.0%}, largest {worst:+.0%}",
    ]
    if not any(point.algorithm == "circulant" for point in tuning.points):
        lines.append("# circulant_share is not measured: two ranks have no partners to change")
    lines += [
        f"#   {point.algorithm} {point.nbytes} bytes: {point.ms:.4f} ms ({error:+.0%})"
        for point, error in zip(tuning.points, tuning.errors, strict=True)
    ]
    lines += [f"{name}: {value:g}" for name, value in tuning.profile.model_dump().items()]
    return "\n".join(lines) + "\n"


def _algorithms(world: int) -> list[str]:
    return ["ring", "recursive_doubling"] + (["circulant"] if world > 2 else [])


def _cases(world: int, config: CoreConfig) -> list[tuple[str, int]]:
    """(algorithm, bytes) of each point; recursive doubling only as far as it is ever used."""
    return [
        (name, nbytes)
        for nbytes in (*SMALL_NBYTES, *LARGE_NBYTES)
        for name in _algorithms(world)
        if name != "recursive_doubling" or nbytes <= config.recursive_doubling_max_nbytes
    ]


def _new_group(algorithm: str) -> dist.ProcessGroup:
    """A group whose all-reduces use this algorithm on one channel: the backend reads the variables as it makes it."""
    with _variable(ALGORITHM_VARIABLE, algorithm), _variable(CHANNELS_VARIABLE, "1"):
        return dist.new_group(backend="mccl")


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _measure_points(
    groups: dict[str, dist.ProcessGroup],
    cases: list[tuple[str, int]],
    seconds: float,
    report: Callable[[str], None] | None,
) -> list[Point]:
    """All cases in turns, block by block, so that whatever else the machines do hits them alike."""
    tensors = {nbytes: torch.zeros(nbytes // 4) for _, nbytes in cases}
    counts = []
    for name, nbytes in cases:
        warm_s = statistics.median(_times(groups[name], tensors[nbytes], WARM_COUNT))
        counts.append(min(MAX_COUNT, max(1, round(seconds / BLOCKS / warm_s))))
    shared = torch.tensor(counts)
    dist.broadcast(shared, 0)  # all ranks must do the same number
    medians: list[list[float]] = [[] for _ in cases]
    for block in range(BLOCKS):
        if report:
            report(f"block {block + 1} of {BLOCKS}")
        for index, (name, nbytes) in enumerate(cases):
            dist.barrier()
            medians[index].append(statistics.median(_times(groups[name], tensors[nbytes], int(shared[index]))))
    slowest = torch.tensor([statistics.median(of_case) for of_case in medians], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [Point(name, nbytes, float(slowest[index]) * 1e3) for index, (name, nbytes) in enumerate(cases)]


def _times(group: dist.ProcessGroup, tensor: torch.Tensor, count: int) -> list[float]:
    """Seconds of each of `count` all-reduces, as this rank sees them."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        times.append(time.perf_counter() - start)
    return times


def _errors(profile: LinkProfile, points: Sequence[Point], world: int, config: CoreConfig) -> list[float]:
    """By point: (predicted - measured) / measured."""
    predicted = {
        (candidate.algorithm, nbytes): candidate.predicted_ms
        for nbytes in {point.nbytes for point in points}
        for candidate in explain(_ALL_REDUCE, nbytes, world, profile=profile, config=config).candidates
    }
    return [predicted[point.algorithm, point.nbytes] / point.ms - 1 for point in points]


def _squared(values: Sequence[float]) -> float:
    return sum(value * value for value in values)


def _least_squares(residuals: Callable[[Sequence[float]], list[float]], start: Sequence[float]) -> list[float]:
    """Levenberg and Marquardt's method with differences for derivatives: the lowest point near `start`."""
    at, now, damping = list(start), residuals(start), 1e-2
    for _ in range(60):
        columns = [
            [(after - before) / 1e-4 for after, before in zip(residuals(moved), now, strict=True)]
            for moved in ([*at[:i], at[i] + 1e-4, *at[i + 1 :]] for i in range(len(at)))
        ]
        slopes = torch.tensor(columns, dtype=torch.float64)
        normal = slopes @ slopes.T
        ridge = damping * (torch.diag(normal.diagonal()) + 1e-9 * torch.eye(len(at), dtype=torch.float64))
        step = torch.linalg.solve(normal + ridge, -slopes @ torch.tensor(now, dtype=torch.float64))
        candidate = [value + float(change) for value, change in zip(at, step.clamp(-1, 1), strict=True)]
        after = residuals(candidate)
        gain = _squared(now) - _squared(after)
        if gain > 0:
            at, now, damping = candidate, after, damping / 5
            if gain < 1e-10:
                break
        else:
            damping *= 5
            if damping > 1e6:
                break
    return at
