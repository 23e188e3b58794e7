"""All-reduce between hosts on links of a given rate: mccl against Gloo and against what iperf3 reaches.

    sudo python benchmarks/shaped.py --world 4 --rate 1000 --mtu 9000 --markdown

The hosts are network namespaces of this machine on one bridge (tests/netns); each one's link is shaped in both
directions by tc's token bucket. What fits its burst passes faster than the wire would carry it, so the smallest burst
that holds iperf3's rate is taken, and each figure moves at least 100 bursts; what fits the burst as a whole is bound by
latency and repeated at least 50 times. `bursts_moved` states it. The link adds no delay of its own. iperf3 measures one
TCP connection between two hosts before and after; shares refer to the better of the two.
Processor seconds hold what the kernel does on behalf of a rank, but not what it does in interrupts of others.

mccl chooses its algorithms by a link profile: the one that is named, or with --tune one that is measured first, on
these links, as `mccl-fleet tune` does. The result holds it, and what it chose.

How it measures stands in measure.py. Needs Linux, root, and the Debian packages iproute2 and iperf3; mccl_core must be
installed or on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from measure import KIB, MIB, Plan, Row, describe, import_mccl, measure_rank
from options import make_parser, positive, tell, whole

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from netns.iperf import MIN_BURSTS_MOVED, measure_goodput, shape_with_smallest_burst
from netns.network import ETHERNET_NBYTES, Link, Network
from netns.ranks import ranks_on
from netns.requirements import unmet_requirement
from netns.tools import NetworkError
from support.ranks import RankFailed, results_of

if TYPE_CHECKING:
    from mccl_core.links import LinkProfile
    from mccl_core.tuning import Tuning

SIZES = [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB]
OP_TIMEOUT_S = 600.0
TUNE_SECONDS = 0.5  # a point; a slow link takes longer, for seven all-reduces
DEFAULT_PROFILE = "ethernet-10g"  # by which groups of several hosts choose where they are told no other


def parse() -> argparse.Namespace:
    """Parses, and ends with a clear message where something cannot be."""
    parser = make_parser(__doc__, SIZES)
    parser.add_argument("--world", type=whole(2, 256, " hosts"), default=4, help="number of hosts, with one rank each")
    parser.add_argument("--rate", type=positive("Mbit/s"), default=1000.0, help="Mbit/s of each host's link")
    parser.add_argument("--mtu", type=whole(576, 65535, " bytes"), default=1500, help="bytes of the largest IP packet")
    parser.add_argument(
        "--burst", type=whole(576, 2**30, " bytes"), help="bytes of the shaper's burst; by default the smallest that"
        " holds iperf3's rate"
    )  # fmt: skip
    parser.add_argument(
        "--queue", type=whole(2048, 2**30, " bytes"), default=MIB, help="bytes that wait at a port before it drops"
    )
    chosen_by = parser.add_mutually_exclusive_group()
    chosen_by.add_argument(
        "--link-profile",
        default=DEFAULT_PROFILE,
        help="by which mccl chooses: a built-in one or a file",
    )
    chosen_by.add_argument("--tune", action="store_true", help="measure the link profile first, on these links")
    parser.add_argument("--iperf-seconds", type=whole(1, 3600, " s"), default=3, help="time of each of iperf3's runs")
    parser.add_argument("--limit", type=positive("seconds"), default=3600.0, help="give up after this many seconds")
    arguments = parser.parse_args()
    frame_nbytes = arguments.mtu + ETHERNET_NBYTES
    for option in ("burst", "queue"):
        value = getattr(arguments, option)
        if value is not None and value < frame_nbytes:
            parser.error(f"argument --{option}: {value} bytes do not hold one frame of {frame_nbytes} bytes (--mtu)")
    if reason := unmet_requirement(("ip", "tc", "iperf3")):
        parser.error(reason)
    try:
        import_mccl()
        from mccl_core import links, settings
    except RuntimeError as error:
        parser.error(str(error))
    try:
        links.load(arguments.link_profile)
    except settings.SettingsError as error:
        parser.error(f"argument --link-profile: {error}")
    return arguments


def tune(network: Network, limit_s: float) -> Tuning:
    """The profile of the network's links, as its hosts measure it together."""
    from mccl_core import tuning

    # The ranks' own group is Gloo's: those that are measured are made by the tuning.
    measuring = ranks_on(
        network.hosts, lambda rank, world: tuning.measure(seconds=TUNE_SECONDS), backend="gloo", timeout_s=OP_TIMEOUT_S
    )
    with measuring as ranks:
        tuned: Tuning = results_of(ranks.outcomes(limit_s))[0]
    return tuned


def measure(network: Network, plan: Plan, profile: LinkProfile, limit_s: float) -> list[Row]:
    """One row a size, with groups that choose by this profile."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "link.yaml"
        file.write_text(yaml.safe_dump(profile.model_dump()))
        measuring = ranks_on(
            network.hosts,
            lambda rank, world: measure_rank(plan),
            backend="gloo",
            timeout_s=OP_TIMEOUT_S,
            MCCL_LINK_PROFILE=str(file),
        )
        with measuring as ranks:
            rows: list[Row] = results_of(ranks.outcomes(limit_s))[0]
    return rows


def run(arguments: argparse.Namespace) -> tuple[dict[str, object], list[Row]]:
    """Makes the network and measures; returns what describes it, and one row a size.

    Raises:
        NetworkError: the network cannot be made, or no burst holds the rate.
        RankFailed: a rank raised, died or did not end within the limit.
    """
    from mccl_core import explain, links

    profile = links.load(arguments.link_profile)
    tuned = None
    with Network(arguments.world, mtu=arguments.mtu) as network:
        if arguments.burst is None:
            link = shape_with_smallest_burst(network, arguments.rate, queue_nbytes=arguments.queue)
        else:
            link = Link(arguments.rate, arguments.burst, arguments.queue)
            network.shape(link)
        seconds = max(arguments.iperf_seconds, MIN_BURSTS_MOVED * link.burst_s)
        goodputs = [measure_goodput(*network.hosts[:2], seconds=seconds, omit_s=1)]
        if arguments.tune:
            tuned = tune(network, arguments.limit)
            profile = tuned.profile
        plan = Plan(
            tuple(arguments.sizes),
            arguments.seconds,
            arguments.in_flight,
            MIN_BURSTS_MOVED * link.burst_nbytes,
            link.burst_nbytes,
        )
        rows = measure(network, plan, profile, arguments.limit)
        goodputs.append(measure_goodput(*network.hosts[:2], seconds=seconds, omit_s=1))
    for row in rows:
        for name in ("mccl", "gloo"):
            row[f"{name}_share"] = row[f"{name}_busbw_GBps"] / max(goodputs)
    words = (
        f"{arguments.world} network namespaces on one bridge, each way of each link: {link}, MTU {arguments.mtu}; "
        f"iperf3 {max(goodputs):.4f} GB/s"
    )
    shaping = {
        "rate_mbit": link.rate_mbit,
        "burst_nbytes": link.burst_nbytes,
        "queue_nbytes": link.queue_nbytes,
        "mtu": arguments.mtu,
        "iperf3_GBps": goodputs,
        "fits_GBps": link.goodput(arguments.mtu),
    }
    chosen = {nbytes: explain("all_reduce", nbytes, arguments.world, profile=profile).chosen for nbytes in plan.sizes}
    by_profile: dict[str, object] = {
        "link_profile": profile.model_dump(),
        "link_profile_from": "tuned on these links, first" if tuned else arguments.link_profile,
        "algorithms": {nbytes: {"name": plan.algorithm, "chunks": plan.chunks} for nbytes, plan in chosen.items()},
    }
    if tuned:
        by_profile["tuned_to"] = [asdict(point) for point in tuned.points]
    return describe(words, arguments.commit) | by_profile | {"shaping": shaping}, rows


def main() -> None:
    """Parses, runs, prints."""
    arguments = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that `timeout`, too, leaves no namespace behind
    try:
        result, rows = run(arguments)
    except (NetworkError, RankFailed) as error:
        sys.exit(f"shaped.py: {error}")
    if arguments.markdown:
        print(f"{result['link']}\n")
    tell(arguments, result, rows, left_out=set())


if __name__ == "__main__":
    main()
