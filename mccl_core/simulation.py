"""What the simulator (csrc/schedule/simulate.hpp) says of all-reduces on a link, and of a training step's buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mccl_core.config import CoreConfig
from mccl_core.links import LinkProfile
from mccl_core.planning import Candidate

if TYPE_CHECKING:
    from mccl_core import _C

# The kernel interleaves connections by packets, or by what TCP hands to the card at once, and not by our segments.
PACKET_NBYTES = 64 * 1024


@dataclass(frozen=True)
class Backward:
    """A training step's backward, which takes `backward_ms` and fills its buckets evenly over that time."""

    backward_ms: float
    """How long it takes alone."""
    bucket_count: int
    """Buckets of gradients."""
    bucket_nbytes: int
    """Bytes of each."""


@dataclass(frozen=True)
class StepPrediction:
    """What a step's all-reduces cost."""

    step_ms: float
    """From the start of backward to the end of the last all-reduce."""
    exposed_ms: float
    """The communication that backward does not hide."""
    goodput_share: float
    """What the buckets have to move, 2(N-1)/N of their bytes, against what the link could have moved while at least
    one bucket was under way."""


def simulate_all_reduces(
    profile: LinkProfile,
    plan: Candidate,
    world: int,
    nbytes: Sequence[int],
    ready_s: Sequence[float],
    *,
    group_of_rank: Sequence[int] = (),
    max_in_flight: int = 0,
    burst_nbytes: int = 0,
    config: CoreConfig | None = None,
) -> _C.Simulation:
    """All-reduces of `nbytes` each, which every rank starts at `ready_s`, all by the same plan.

    Args:
        profile: of the link; its goodput counts once for each of the plan's channels. Its step's processor time is
            charged to each segment that arrives, in equal parts to its packets.
        plan: algorithm and numbers of chunks and channels; its predicted time is not used.
        world: number of ranks.
        nbytes: of each tensor.
        ready_s: when each may start, in seconds.
        group_of_rank: the switch of each rank; empty where all are behind one.
        max_in_flight: all-reduces that a rank has under way at once; 0: all that are ready.
        burst_nbytes: what an idle port saves up and then passes at once, where a token bucket shapes it; 0: a wire.
        config: gives the sizes of segments and credit; by default its defaults.

    Raises:
        ValueError: the arguments make no sense; the text says which.
        RuntimeError: the ranks would wait for each other for ever.
    """
    from mccl_core import _C  # loads torch, for which whoever only imports this module need not wait

    config = config or CoreConfig.model_validate({})
    goodput = _goodput_bytes_per_s(profile, plan)
    narrow = profile.uplink_GBps > 0
    switches = group_of_rank if len(set(group_of_rank)) > 1 else ()  # behind one, two-level goes by teams of its own
    packet_nbytes = min(PACKET_NBYTES, config.segment_nbytes)
    result = _C.simulate(
        "all_reduce",
        plan.algorithm,
        world=world,
        nbytes=list(nbytes),
        ready_s=list(ready_s),
        alpha_s=profile.latency_us / 1e6,
        goodput_bytes_per_s=goodput,
        segment_nbytes=packet_nbytes,
        forward_nbytes=0,  # what forwarding costs is part of the latency
        credit_nbytes=config.credit_nbytes,
        chunk_count=plan.chunks,
        channel_count=plan.channels,
        segment_cost_s=profile.step_us / 1e6 * packet_nbytes / config.segment_nbytes,
        burst_nbytes=burst_nbytes,
        groups=list(switches) if narrow or plan.algorithm == "two_level" else [],
        uplink_goodput_bytes_per_s=profile.uplink_GBps * 1e9 if narrow else goodput * world,
        max_in_flight=max_in_flight,
    )
    if result["deadlock"] is not None:
        raise RuntimeError(f"{plan.algorithm} with {world} ranks: {result['deadlock']}")
    return result


def simulate_step(
    profile: LinkProfile,
    plan: Candidate,
    world: int,
    backward: Backward,
    *,
    group_of_rank: Sequence[int] = (),
    max_in_flight: int = 0,
    config: CoreConfig | None = None,
) -> StepPrediction:
    """One training step; arguments and errors are those of `simulate_all_reduces`."""
    count = backward.bucket_count
    result = simulate_all_reduces(
        profile,
        plan,
        world,
        [backward.bucket_nbytes] * count,
        [backward.backward_ms / 1e3 * (index + 1) / count for index in range(count)],
        group_of_rank=group_of_rank,
        max_in_flight=max_in_flight,
        config=config,
    )
    busy_s = _covered_s(list(zip(result["posted_s"], result["finish_s"], strict=True)))
    wire_s = 2 * (world - 1) / world * backward.bucket_nbytes * count / _goodput_bytes_per_s(profile, plan)
    step_ms = result["last_finish_s"] * 1e3
    return StepPrediction(step_ms, step_ms - backward.backward_ms, wire_s / busy_s if busy_s > 0 else 1.0)


def _goodput_bytes_per_s(profile: LinkProfile, plan: Candidate) -> float:
    return profile.goodput_GBps * 1e9 * plan.channels


def _covered_s(intervals: list[tuple[float, float]]) -> float:
    """Seconds in which at least one of the intervals is open."""
    total, end = 0.0, -math.inf
    for begin, finish in sorted(intervals):
        total += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return total
