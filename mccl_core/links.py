"""Link profiles: what a message costs between two ranks. From them every rank chooses the same algorithms.

A profile is a YAML file with the fields of `LinkProfile`, measured once by `mccl-fleet tune`, or one of the built-in
ones by name. MCCL_LINK_PROFILE names it; without it the ranks of one host use `loopback` and all others `ethernet-10g`.
"""

from __future__ import annotations

import os
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field

from mccl_core.settings import SettingsError, resolve


class LinkProfile(BaseModel):
    """Costs of a link, as the planner's formulas use them (docs/algorithms.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    latency_us: float = Field(gt=0, le=1e6, description="From a send to its use on the next rank, in µs.")
    step_us: float = Field(ge=0, le=1e6, description="Processor time of one step of a schedule, in µs.")
    goodput_GBps: float = Field(gt=0, le=1e3, description="Payload that a rank sends, or receives, in GB/s.")
    uplink_GBps: float = Field(
        default=0,
        ge=0,
        le=1e4,
        description="Payload between two switches, each way, in GB/s; 0: as fast as what is behind.",
    )
    channels: int = Field(
        default=1,
        ge=1,
        le=8,
        description="The most channels that a collective is spread over: links that are faster than one core have more "
        "than one. The other figures are those of one channel.",
    )
    circulant_share: float = Field(
        default=1, gt=0, le=1, description="Share of the goodput where partners change from round to round."
    )


# The paper's Macs: goodput and cost of a hop (arXiv 2610.39029).
ETHERNET_10G = LinkProfile(latency_us=306, step_us=0, goodput_GBps=1.238, circulant_share=0.86)
# Unix sockets between ranks of one machine; from benchmarks/allreduce.py on 16 cores.
LOOPBACK = LinkProfile(latency_us=10, step_us=10, goodput_GBps=4, circulant_share=0.9)
# What a program prints before a profile, as a JSON string, on a line among others.
PRINTED_PREFIX = "link profile: "
BUILT_IN = {"ethernet-10g": ETHERNET_10G, "loopback": LOOPBACK}


def load(name: str) -> LinkProfile:
    """Returns the built-in profile of that name, or reads the YAML file.

    Raises:
        SettingsError: no such profile or file, or a field of it is wrong; the text names file, field and range.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    path = Path(name).expanduser()
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SettingsError(
            f"link_profile (MCCL_LINK_PROFILE): cannot read {path}: {error.strerror}; give a file that "
            f"`mccl-fleet tune` wrote, or one of {', '.join(BUILT_IN)}"
        ) from error
    except yaml.YAMLError as error:
        raise SettingsError(f"link_profile (MCCL_LINK_PROFILE): {path} is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise SettingsError(
            f"link_profile (MCCL_LINK_PROFILE): {path} must be a mapping of {', '.join(LinkProfile.model_fields)}"
        )
    return resolve(LinkProfile, file=values, environ={}, file_name=str(path)).values


def default_profile(hosts: list[str]) -> LinkProfile:
    """The profile of a group whose ranks run on these hosts, where none was named.

    Ranks of one machine spread large ops over two channels where each of their threads can have a core.
    """
    if len(set(hosts)) > 1:
        return ETHERNET_10G
    spare_cores = (os.cpu_count() or 1) >= 2 * len(hosts)
    return LOOPBACK.model_copy(update={"channels": 2}) if spare_cores else LOOPBACK
