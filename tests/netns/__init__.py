"""Hosts as Linux network namespaces, joined by bridges, with links that are shaped, cut and lossy.

    with Network(4, mtu=9000) as network:
        network.shape(Link(rate_mbit=1000, burst_nbytes=32 * 1024))
        network.hosts[0].run(["iperf3", "-c", network.hosts[1].address])

What there is: network.py (hosts, links, faults), names.py (whose namespace is whose, and the sweep of leftovers),
iperf.py (goodput, the smallest burst that holds a rate), ranks.py (one rank a host), requirements.py (what it needs).

Two things differ from a real switch. Links add no delay of their own: these kernels have no netem, so a round trip is
what queues and the scheduler make it. And what fits the shaper's burst passes faster than the wire would carry it.
"""
