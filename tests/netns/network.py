"""Hosts, the switches between them, and what can happen to a link."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from types import TracebackType
from typing import Self

from netns.host import INTERFACE, Host
from netns.names import name_prefix, remove, sweep
from netns.tools import NetworkError, run_tool

KIB, MIB = 1024, 1024 * 1024
ETHERNET_NBYTES = 14
FIRST_ADDRESS = IPv4Address("10.0.0.1")
PREFIX_BITS = 16
MAX_HOSTS = 1000  # a Linux bridge has 1,023 ports


@dataclass(frozen=True)
class Link:
    """How a link is shaped, in each direction (tc's tbf).

    `burst_nbytes` may pass at once after a pause. `queue_nbytes` wait at most, more are dropped: a switch's buffer.
    """

    rate_mbit: float
    burst_nbytes: int
    queue_nbytes: int = MIB

    def __str__(self) -> str:
        return f"{self.rate_mbit:g} Mbit/s, burst {self.burst_nbytes} bytes, queue {self.queue_nbytes} bytes"

    @property
    def burst_s(self) -> float:
        """How long a burst takes at the link's rate, in seconds."""
        return self.burst_nbytes * 8 / (self.rate_mbit * 1e6)

    def goodput(self, mtu: int) -> float:
        """The payload that TCP over IPv4 with timestamps can carry at most, in GB/s."""
        return self.rate_mbit / 8e3 * (mtu - 52) / (mtu + ETHERNET_NBYTES)


@dataclass(frozen=True)
class Drop:
    """What a receiver drops: a share (0 to 1) of what comes from `source`, or from everybody."""

    source: str | None
    share: float

    def __str__(self) -> str:
        sender = [f"ip saddr {self.source}"] if self.source else []
        chance = [f"numgen random mod 1000000 < {round(self.share * 1e6)}"] if self.share < 1 else []
        return " ".join([*sender, *chance, "drop"])


class Network:
    """Hosts h0, h1, … on one bridge, or on one bridge a switch group, each with an uplink to a bridge between them.

    Links are as fast as the machine until `shape` and `shape_uplink` say otherwise. The bridges have a namespace of
    their own: the machine's network is not touched. Closing removes all, with the processes in it.
    """

    def __init__(self, host_count: int, *, mtu: int = 1500, groups: Sequence[int] | None = None) -> None:
        """
        Args:
            host_count: number of hosts.
            mtu: bytes of the largest IP packet.
            groups: hosts of each switch group, in order; None for one switch.

        Raises:
            ValueError: the groups do not add up to the hosts, or a number is out of range.
        """
        self.groups = tuple(groups or [host_count])
        if not 1 <= host_count <= MAX_HOSTS:
            raise ValueError(f"host_count is {host_count}, but must be between 1 and {MAX_HOSTS}")
        if sum(self.groups) != host_count or min(self.groups) < 1:
            raise ValueError(f"groups {self.groups} must be positive and add up to host_count, {host_count}")
        if not 576 <= mtu <= 65535:
            raise ValueError(f"mtu is {mtu}, but must be between 576 and 65535 bytes")
        self.mtu = mtu
        self._owner = os.getpid()
        prefix = name_prefix()
        self._switch = f"{prefix}-switch"
        self.hosts = [
            Host(f"h{i}", f"{prefix}-h{i}", str(FIRST_ADDRESS + i), port=f"port{i}") for i in range(host_count)
        ]
        self._namespaces: list[str] = []
        self._drops: dict[Host, list[Drop]] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Makes it, after a sweep of what dead owners have left. On failure nothing is left.

        Raises:
            NetworkError: the kernel or a container does not allow it; the text holds the tool's answer.
        """
        sweep()
        try:
            self._make_namespace(self._switch)
            self._make_bridges()
            for index, host in enumerate(self.hosts):
                self._make_host(host, self._bridge_of(index))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Removes everything that `start` has made. In a forked child this does nothing."""
        if os.getpid() != self._owner:
            return
        while self._namespaces:
            with contextlib.suppress(NetworkError):  # it is gone already, or never came to be
                remove(self._namespaces[-1])
            self._namespaces.pop()

    def shape(self, link: Link, *hosts: Host) -> None:
        """Shapes the links of these hosts, or of all, in both directions. May be called again."""
        for host in hosts or self.hosts:
            _shape(host.namespace, INTERFACE, link)
            _shape(self._switch, host.port, link)

    def shape_uplink(self, link: Link) -> None:
        """Shapes the uplinks of all switch groups, in both directions. May be called again."""
        for group in range(len(self.groups)):
            _shape(self._switch, f"up{group}", link)
            _shape(self._switch, f"down{group}", link)

    def cut(self, host: Host) -> None:
        """Pulls the host's cable out of the switch. Its sockets are not told."""
        self._set_port(host.port, "down")

    def mend(self, host: Host) -> None:
        """Plugs it in again."""
        self._set_port(host.port, "up")

    def cut_uplink(self, group: int) -> None:
        """Parts a switch group from the others."""
        self._set_port(f"down{group}", "down")

    def mend_uplink(self, group: int) -> None:
        """Joins it to them again."""
        self._set_port(f"down{group}", "up")

    def drop(self, host: Host, peer: Host | None = None, *, share: float = 1.0) -> None:
        """Loses packets between `host` and `peer`, or all others, in both directions, until `stop_dropping`.

        They are dropped where they arrive: the sender cannot tell, as with a bad cable.

        Args:
            share: of the packets, drawn at random; 1 loses all.
        """
        if not 1e-6 <= share <= 1:
            raise ValueError(f"share is {share}, but must be between 0.000001 and 1")
        self._add_drop(host, Drop(peer.address if peer else None, share))
        for other in [peer] if peer else [other for other in self.hosts if other is not host]:
            self._add_drop(other, Drop(host.address, share))

    def stop_dropping(self) -> None:
        """Ends all that `drop` has begun."""
        for host in self._drops:
            host.run(["nft", "delete table ip losses"])
        self._drops.clear()

    def _make_namespace(self, name: str) -> None:
        self._namespaces.append(name)  # first, so that an interrupt in between leaves nothing
        run_tool("ip", "netns", "add", name)

    def _make_bridges(self) -> None:
        bridges = [f"bridge{group}" for group in range(len(self.groups))]
        uplinks = [(f"up{group}", f"down{group}") for group in range(len(bridges))] if len(bridges) > 1 else []
        for name in [*bridges, *(["core"] if uplinks else [])]:
            self._ip("add", name, "mtu", str(self.mtu), "type", "bridge")
            self._ip("set", name, "up", "addrgenmode", "none")
        for bridge, (up, down) in zip(bridges, uplinks, strict=False):
            self._ip("add", up, "mtu", str(self.mtu), "type", "veth", "peer", "name", down, "mtu", str(self.mtu))
            self._ip("set", up, "master", bridge, "up", "addrgenmode", "none")
            self._ip("set", down, "master", "core", "up", "addrgenmode", "none")

    def _make_host(self, host: Host, bridge: str) -> None:
        self._make_namespace(host.namespace)
        mtu = ("mtu", str(self.mtu))
        self._ip("add", host.port, *mtu, "type", "veth", "peer", "name", INTERFACE, *mtu, "netns", host.namespace)
        self._ip("set", host.port, "master", bridge, "up", "addrgenmode", "none")
        commands = [
            "link set lo up",
            f"link set {INTERFACE} up addrgenmode none",
            f"address add {host.address}/{PREFIX_BITS} dev {INTERFACE}",
        ]
        run_tool("ip", "-n", host.namespace, "-batch", "-", stdin="\n".join(commands))

    def _bridge_of(self, index: int) -> str:
        group = 0
        while index >= sum(self.groups[: group + 1]):
            group += 1
        return f"bridge{group}"

    def _ip(self, *arguments: str) -> None:
        run_tool("ip", "-n", self._switch, "link", *arguments)

    def _set_port(self, port: str, state: str) -> None:
        self._ip("set", port, state)

    def _add_drop(self, host: Host, drop: Drop) -> None:
        drops = self._drops.setdefault(host, [])
        drops.append(drop)
        rules = "\n".join(map(str, drops))
        # Made if it was not there, emptied, filled: in one transaction.
        table = f"""
            table ip losses
            delete table ip losses
            table ip losses {{
                chain arriving {{
                    type filter hook prerouting priority raw; policy accept;
                    {rules}
                }}
            }}
        """
        host.run(["nft", "-f", "-"], stdin=table)


def _shape(namespace: str, interface: str, link: Link) -> None:
    rate = f"{round(link.rate_mbit * 1e6)}bit"
    limits = ["burst", str(link.burst_nbytes), "limit", str(link.queue_nbytes)]
    run_tool("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf", "rate", rate, *limits)
