"""Goodput as iperf3 measures it, and the smallest burst that holds a rate."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
from collections.abc import Iterator
from typing import Any

from netns.host import Host
from netns.network import ETHERNET_NBYTES, KIB, MIB, Link, Network
from netns.tools import NetworkError

HELD_SHARE = 0.97  # of the payload that fits the rate
# 72 KiB let a packet of 64 KiB pass uncut, with the headers of its frames.
BURSTS = [size * KIB for size in (4, 8, 16, 32, 72, 128, 256, 512, 1024, 2048)]
MIN_BURSTS_MOVED = 100  # so that the first one, which passes at once, adds a hundredth at most
TRIES = 3  # a busy machine may spoil one, but none is better than the link


def measure_goodput(sender: Host, receiver: Host, *, seconds: float, omit_s: int = 0) -> float:
    """What one TCP connection carries from `sender` to `receiver`, in GB/s, as the receiver counts it.

    Blocks for `omit_s` + `seconds`; the first `omit_s` are not counted.

    Raises:
        NetworkError: iperf3 failed; the text is its own.
    """
    return measure_goodputs([(sender, receiver)], seconds=seconds, omit_s=omit_s)[0]


def measure_goodputs(pairs: list[tuple[Host, Host]], *, seconds: float, omit_s: int = 0) -> list[float]:
    """Like `measure_goodput`, for several pairs at once; no host may receive twice."""
    with contextlib.ExitStack() as ending:
        for _, receiver in pairs:
            server = ending.enter_context(_running(receiver, ["--server", "--one-off", "--forceflush"]))
            assert any("listening" in line for line in server.stdout or [])
        clients = []
        for sender, receiver in pairs:
            command = ["--client", receiver.address, "--json", "--time", str(math.ceil(seconds)), "--omit", str(omit_s)]
            clients.append(ending.enter_context(_running(sender, command)))
        reports = [json.loads(client.communicate(timeout=omit_s + seconds + 30)[0] or "{}") for client in clients]
    for (sender, receiver), report in zip(pairs, reports, strict=True):
        if "end" not in report or "error" in report:
            raise NetworkError(f"iperf3 from {sender.name} to {receiver.name}: {report.get('error', 'no report')}")
    return [float(report["end"]["sum_received"]["bits_per_second"]) / 8e9 for report in reports]


@contextlib.contextmanager
def _running(host: Host, arguments: list[str]) -> Iterator[subprocess.Popen[Any]]:
    process = host.popen(["iperf3", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def shape_with_smallest_burst(network: Network, rate_mbit: float, *, queue_nbytes: int = MIB) -> Link:
    """Shapes all links to a rate with the smallest burst that holds it; returns how they are shaped.

    It is held if iperf3 reaches it on all links at once, each host sending to the next. A burst that is too small
    loses rate between two timer interrupts, and cuts every packet of 64 KiB into frames, which costs the processors
    more than all else; one that is too large lets whole messages pass faster than the wire would.

    Raises:
        NetworkError: no burst holds the rate; the text says what was reached.
    """
    best = 0.0
    hosts = network.hosts
    ring = [(host, hosts[(index + 1) % len(hosts)]) for index, host in enumerate(hosts)]
    for burst in BURSTS:
        if burst < network.mtu + ETHERNET_NBYTES:
            continue
        link = Link(rate_mbit, burst, queue_nbytes)
        network.shape(link)
        seconds = max(1.0, MIN_BURSTS_MOVED * link.burst_s)
        for _ in range(TRIES):
            reached = min(measure_goodputs(ring, seconds=seconds, omit_s=1))
            if reached >= HELD_SHARE * link.goodput(network.mtu):
                return link
            best = max(best, reached)
    raise NetworkError(
        f"iperf3 reaches {best:.4f} GB/s on all links at once at {rate_mbit:g} Mbit/s and MTU {network.mtu}, whatever "
        f"the burst, where {link.goodput(network.mtu):.4f} GB/s would fit: this machine is too slow or too busy; give "
        "a burst, fewer hosts, a lower rate or a larger MTU"
    )
