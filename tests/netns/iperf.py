"""Goodput as iperf3 measures it, and the smallest burst that holds a rate."""

from __future__ import annotations

import json
import subprocess

from netns.host import Host
from netns.network import ETHERNET_NBYTES, KIB, MIB, Link, Network
from netns.tools import NetworkError

HELD_SHARE = 0.97  # of the payload that fits the rate
BURSTS = [size * KIB for size in (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)]
MIN_BURSTS_MOVED = 100  # so that the first one, which passes at once, adds a hundredth at most


def measure_goodput(sender: Host, receiver: Host, *, seconds: float, omit_s: int = 0) -> float:
    """What one TCP connection carries from `sender` to `receiver`, in GB/s, as the receiver counts it.

    Blocks for `omit_s` + `seconds`; the first `omit_s` are not counted.

    Raises:
        NetworkError: iperf3 failed; the text is its own.
    """
    server = receiver.popen(["iperf3", "--server", "--one-off", "--forceflush"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if "listening" in line:
                break
        command = ["iperf3", "--client", receiver.address, "--json", "--time", f"{seconds:.0f}", "--omit", str(omit_s)]
        client = sender.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            output, errors = client.communicate(timeout=omit_s + seconds + 30)
        except BaseException:
            client.kill()
            client.wait()
            raise
        report = json.loads(output or "{}")
        if client.returncode != 0 or "error" in report:
            raise NetworkError(f"iperf3 from {sender.name} to {receiver.name}: {report.get('error') or errors}")
        return float(report["end"]["sum_received"]["bits_per_second"]) / 8e9
    finally:
        server.kill()
        server.communicate()


def shape_with_smallest_burst(network: Network, rate_mbit: float, *, queue_nbytes: int = MIB) -> Link:
    """Shapes all links to a rate with the smallest burst at which iperf3 reaches it; returns how they are shaped.

    A burst that is too small loses rate between two of the kernel's timer interrupts, one that is too large lets whole
    messages pass faster than the wire would.

    Raises:
        NetworkError: no burst holds the rate; the text says what was reached.
    """
    best = 0.0
    for burst in BURSTS:
        if burst < network.mtu + ETHERNET_NBYTES:
            continue
        link = Link(rate_mbit, burst, queue_nbytes)
        network.shape(link)
        seconds = max(1, round(MIN_BURSTS_MOVED * burst * 8 / (rate_mbit * 1e6) + 0.5))
        # A busy machine may spoil a try, but nothing makes one better than the link is.
        for _ in range(2):
            reached = measure_goodput(network.hosts[0], network.hosts[1], seconds=seconds)
            if reached >= HELD_SHARE * link.goodput(network.mtu):
                return link
            best = max(best, reached)
    raise NetworkError(
        f"iperf3 reaches {best:.4f} GB/s at {rate_mbit:g} Mbit/s and MTU {network.mtu}, whatever the burst, where "
        f"{link.goodput(network.mtu):.4f} GB/s would fit: give a burst, a lower rate or a larger MTU"
    )
