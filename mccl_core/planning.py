"""Which algorithm a collective uses, and why: the Python face of csrc/op/plan.hpp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mccl_core import links
from mccl_core.config import CoreConfig
from mccl_core.links import LinkProfile

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class Candidate:
    """One way to run a collective, and the time in ms that the link profile predicts for it alone on the link."""

    algorithm: str
    """As MCCL_ALLREDUCE_ALGO names it; empty where there is only one."""
    chunks: int
    """Parts of each channel that go side by side, 1 for most algorithms."""
    predicted_ms: float
    """From the formulas in docs/algorithms.md."""
    channels: int = 1
    """Pairs of engine threads, each with connections of its own, that share the op."""


@dataclass(frozen=True)
class Explanation:
    """What a collective will use. `candidates` are sorted, the fastest first; `chosen` is among them."""

    collective: str
    """As asked for."""
    nbytes: int
    """As asked for."""
    world: int
    """Number of ranks, as asked for."""
    profile: LinkProfile
    """What the choice is made by."""
    chosen: Candidate
    """What a group uses."""
    candidates: tuple[Candidate, ...]
    """All that could be used."""

    def __str__(self) -> str:
        head = (
            f"{self.collective} of {self.nbytes} bytes on {self.world} ranks "
            f"({self.profile.latency_us:g} µs, {self.profile.goodput_GBps:g} GB/s):"
        )
        lines = [
            f"  {'->' if c == self.chosen else '  '} {c.algorithm:<20} {c.predicted_ms:10.3f} ms"
            + (f"  in {c.chunks} chunks" if c.chunks > 1 else "")
            + (f"  on {c.channels} channels" if c.channels > 1 else "")
            for c in self.candidates
        ]
        return "\n".join([head, *lines])


def planner_options(config: CoreConfig, profile: LinkProfile, group_of_rank: Sequence[int]) -> dict[str, Any]:
    """The fields of the C++ struct `Planner`."""
    return {
        "latency_s": profile.latency_us / 1e6,
        "step_s": profile.step_us / 1e6,
        "nbytes_per_s": profile.goodput_GBps * 1e9,
        "uplink_nbytes_per_s": profile.uplink_GBps * 1e9,
        "circulant_share": profile.circulant_share,
        "all_reduce_algorithm": config.allreduce_algo,
        "recursive_doubling_max_nbytes": config.recursive_doubling_max_nbytes,
        "chunk_nbytes": config.chunk_nbytes,
        "channels": config.channels or profile.channels,
        "channel_nbytes": config.channel_nbytes,
        "group_of_rank": list(group_of_rank) if len(set(group_of_rank)) > 1 else [],
    }


def number_groups(names: Sequence[str]) -> list[int]:
    """Switch groups as numbers in the order in which ranks name them: ["a", "b", "a"] → [0, 1, 0]."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def share_switches(world: int, size: int) -> list[int]:
    """The switch of each rank where as few switches of `size` ports as hold `world` ranks are filled evenly.

    A last switch with a few ranks would leave the shards of a two-level all-reduce to as few on every other.
    """
    count = -(-world // size)
    return [rank * count // world for rank in range(world)]


def explain(
    collective: Collective,
    nbytes: int,
    world: int,
    *,
    profile: LinkProfile | None = None,
    switch_groups: Sequence[str] = (),
    config: CoreConfig | None = None,
) -> Explanation:
    """Says which algorithm a group of `world` ranks uses, and what the others would cost.

    Args:
        collective: all_reduce, all_gather or reduce_scatter; all other collectives have one algorithm.
        nbytes: of the tensor (all_reduce), or of one rank's block.
        world: number of ranks.
        profile: of the link; by default MCCL_LINK_PROFILE's, or else that of 10 Gbit/s Ethernet.
        switch_groups: for each rank the name of its switch; empty where all are behind one.
        config: by default the MCCL_* variables.

    Raises:
        ValueError: an argument is out of range; the text names it.
        SettingsError: an MCCL_* variable or the profile cannot be used.
    """
    from mccl_core import _C  # loads torch, for which whoever only imports this module need not wait

    if collective not in get_args(Collective):
        raise ValueError(f"collective: {collective!r} is not one of {', '.join(get_args(Collective))}")
    if world < 1:
        raise ValueError(f"world: {world} is not a number of ranks; give 1 or more")
    if nbytes < 0:
        raise ValueError(f"nbytes: {nbytes} is negative")
    if switch_groups and len(switch_groups) != world:
        raise ValueError(f"switch_groups: {len(switch_groups)} names for {world} ranks; give one for each")
    config = config or CoreConfig.from_environment()
    if profile is None:
        profile = links.load(config.link_profile) if config.link_profile else links.ETHERNET_10G
    options = planner_options(config, profile, number_groups(switch_groups))
    chosen, *candidates = [
        Candidate(name, chunks, seconds * 1e3, channels)
        for name, chunks, seconds, channels in _C.plans(options, collective, world, nbytes)
    ]
    return Explanation(collective, nbytes, world, profile, chosen, tuple(candidates))
