"""All-reduce between hosts on links of a given rate: mccl against Gloo and against what iperf3 reaches.

    sudo python benchmarks/shaped.py --world 4 --rate 1000 --mtu 9000 --markdown

The hosts are network namespaces of this machine on one bridge (tests/netns); each one's link is shaped in both
directions by tc's token bucket. What fits its burst passes faster than the wire would carry it, so the smallest burst
that holds iperf3's rate is taken, and each figure moves at least 100 bursts. The link adds no delay of its own. iperf3
measures one TCP connection between two hosts before and after; shares refer to the better of the two.
Processor seconds hold what the kernel does on behalf of a rank, but not what it does in interrupts of others.

How it measures stands in measure.py. Needs Linux, root, and the Debian packages iproute2 and iperf3; mccl_core must be
installed or on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from measure import KIB, MIB, Plan, Row, describe, import_mccl, measure_rank
from options import make_parser, positive, tell, whole

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from netns.iperf import MIN_BURSTS_MOVED, measure_goodput, shape_with_smallest_burst
from netns.network import ETHERNET_NBYTES, Link, Network
from netns.ranks import ranks_on
from netns.requirements import unmet_requirement
from netns.tools import NetworkError
from support.ranks import RankFailed, results_of

SIZES = [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB]
OP_TIMEOUT_S = 600.0


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
    except RuntimeError as error:
        parser.error(str(error))
    return arguments


def run(arguments: argparse.Namespace) -> tuple[dict[str, object], list[Row]]:
    """Makes the network and measures; returns what describes it, and one row a size.

    Raises:
        NetworkError: the network cannot be made, or no burst holds the rate.
        RankFailed: a rank raised, died or did not end within the limit.
    """
    with Network(arguments.world, mtu=arguments.mtu) as network:
        if arguments.burst is None:
            link = shape_with_smallest_burst(network, arguments.rate, queue_nbytes=arguments.queue)
        else:
            link = Link(arguments.rate, arguments.burst, arguments.queue)
            network.shape(link)
        seconds = max(arguments.iperf_seconds, MIN_BURSTS_MOVED * link.burst_s)
        goodputs = [measure_goodput(*network.hosts[:2], seconds=seconds, omit_s=1)]
        plan = Plan(
            tuple(arguments.sizes), arguments.seconds, arguments.in_flight, MIN_BURSTS_MOVED * link.burst_nbytes
        )
        with ranks_on(
            network.hosts, lambda rank, world: measure_rank(plan), backend="gloo", timeout_s=OP_TIMEOUT_S
        ) as ranks:
            rows: list[Row] = results_of(ranks.outcomes(arguments.limit))[0]
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
    # What groups of several hosts choose by.
    return describe(words, arguments.commit) | {"link_profile": "ethernet-10g", "shaping": shaping}, rows


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
