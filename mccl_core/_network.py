"""Which of this machine's addresses a rank listens on, and why.

MCCL_LISTEN_ADDR, else MCCL_IFNAME, else a Thunderbolt bridge (169.254/16) where the master has an address on one, else
the route to the store's host.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Any

import torch.distributed as dist

from mccl_core._interfaces import Address, Interface, list_interfaces
from mccl_core.config import CoreConfig

LOOPBACK = "127.0.0.1"
_SOME_PORT = 9  # nothing is sent there: the routing table is asked


class NetworkError(ValueError):
    """No address can be chosen; the text names the variable, and the interfaces that exist."""


@dataclass(frozen=True)
class NetworkChoice:
    """The address that this rank listens on. `str()` is meant for people.

    `interface` is None where no interface has the address; `port` is None until a process group listens.
    """

    address: str
    interface: str | None
    reason: str
    store_host: str
    interfaces: tuple[Interface, ...]
    port: int | None = None

    def __str__(self) -> str:
        where = f"{self.address} on {self.interface}" if self.interface else self.address
        port = f", port {self.port}" if self.port is not None else ""
        lines = [f"listens on {where}{port}: {self.reason}", f"store's host: {self.store_host}", "interfaces:"]
        lines += [f"  {'->' if each.name == self.interface else '  '} {each}" for each in self.interfaces]
        return "\n".join(lines)


def store_host(store: Any) -> str:
    """The host of a c10d store; loopback where it has none."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", LOOPBACK))


def choose(config: CoreConfig, host: str, interfaces: Sequence[Interface] | None = None) -> NetworkChoice:
    """Chooses the address to listen on, for a store on `host`.

    Raises:
        NetworkError: none fits; the text names the variable and lists the interfaces.
    """
    known = tuple(list_interfaces() if interfaces is None else interfaces)
    choice = _Chooser(known, host)
    if config.listen_addr is not None:
        return choice.by_address(config.listen_addr, config.ifname)
    if config.ifname is not None:
        return choice.by_interface(config.ifname)
    return choice.by_route()


@dataclass(frozen=True)
class _Chooser:
    interfaces: tuple[Interface, ...]
    host: str

    def by_address(self, text: str, ifname: str | None) -> NetworkChoice:
        try:
            address = ip_address(text)
        except ValueError:
            raise self._error(f"listen_addr (MCCL_LISTEN_ADDR): {text!r} is not an IP address") from None
        if address.is_unspecified:
            raise self._error(f"listen_addr (MCCL_LISTEN_ADDR): {text} is every interface; name one address")
        owner = self._owner(address)
        if owner is None:
            raise self._error(f"listen_addr (MCCL_LISTEN_ADDR): {text} is no address of this machine")
        if ifname is not None and owner.name not in _names(ifname):
            raise self._error(
                f"listen_addr (MCCL_LISTEN_ADDR): {text} is on {owner.name}, but ifname (MCCL_IFNAME) is {ifname!r}"
            )
        return self._choice(str(self._scoped(address, owner)), owner, "MCCL_LISTEN_ADDR says so")

    def by_interface(self, ifname: str) -> NetworkChoice:
        for name in _names(ifname):
            for interface in self.interfaces:
                if interface.name == name and interface.addresses:
                    address = min(interface.addresses, key=self._rank)
                    return self._choice(str(address), interface, f"MCCL_IFNAME is {ifname}")
        raise self._error(f"ifname (MCCL_IFNAME): no interface {ifname!r} is up and has an address")

    def by_route(self) -> NetworkChoice:
        targets = self._resolve()
        bridged = [target for target in targets if _is_thunderbolt(ip_address(target[4][0]))]
        return self._by_bridge(bridged) or self._by_table(targets)

    def _by_bridge(self, targets: list[Any]) -> NetworkChoice | None:
        """Where the master has an address on a Thunderbolt bridge, even if it has a slower one as well."""
        reason = "the master is on a Thunderbolt bridge (169.254/16)"
        bridges = self._bridges()
        if not targets or not bridges:
            return None
        sources = [source for target in targets if (source := _source_of(target)) is not None]
        for bridge in bridges:
            for source in sources:
                if source in bridge.addresses:
                    return self._choice(str(source), bridge, reason)
        address = next(address for address in bridges[0].addresses if _is_thunderbolt(address))
        return self._choice(str(address), bridges[0], f"{reason}, and this is this machine's")

    def _by_table(self, targets: list[Any]) -> NetworkChoice:
        for target in targets:
            source = _source_of(target)
            if source is not None:
                owner = self._owner(source)
                source = self._scoped(source, owner) if owner else source
                return self._choice(str(source), owner, f"the route to {self.host} leaves from there")
        raise self._error(f"no route to the store's host {self.host!r}; set MCCL_IFNAME or MCCL_LISTEN_ADDR")

    def _resolve(self) -> list[Any]:
        try:
            return list(dict.fromkeys(socket.getaddrinfo(self.host, _SOME_PORT, type=socket.SOCK_DGRAM)))
        except OSError as error:
            raise self._error(
                f"the store's host {self.host!r} has no address: {error.strerror}; set MCCL_IFNAME or MCCL_LISTEN_ADDR"
            ) from error

    def _bridges(self) -> list[Interface]:
        """Interfaces with an address in 169.254/16: Thunderbolt bridges first, which macOS calls bridge0."""
        found = [i for i in self.interfaces if any(map(_is_thunderbolt, i.addresses))]
        return sorted(found, key=lambda interface: not interface.name.startswith("bridge"))

    def _rank(self, address: Address) -> tuple[bool, bool]:
        """Sorts an interface's addresses: of the store's family first, then those that need no scope."""
        try:
            wanted = ip_address(self.host).version
        except ValueError:
            wanted = 4
        return address.version != wanted, address.version == 6 and address.is_link_local

    def _owner(self, address: Address) -> Interface | None:
        for interface in self.interfaces:
            if any(_bare(address) == _bare(own) and _same_scope(address, own) for own in interface.addresses):
                return interface
        loopback = next((i for i in self.interfaces if any(a.is_loopback for a in i.addresses)), None)
        return loopback if address.is_loopback else None  # all of 127/8 is

    @staticmethod
    def _scoped(address: Address, owner: Interface) -> Address:
        if isinstance(address, IPv6Address) and address.is_link_local:
            return IPv6Address(f"{_bare(address)}%{owner.name}")
        return address

    def _choice(self, address: str, interface: Interface | None, reason: str) -> NetworkChoice:
        return NetworkChoice(address, interface.name if interface else None, reason, self.host, self.interfaces)

    def _error(self, text: str) -> NetworkError:
        return NetworkError(f"{text}; the interfaces here are {'; '.join(map(str, self.interfaces)) or 'none'}")


def _names(ifname: str) -> list[str]:
    return [name.strip() for name in ifname.split(",") if name.strip()]


def _is_thunderbolt(address: Address) -> bool:
    return address.version == 4 and address.is_link_local


def _bare(address: Address) -> Address:
    return IPv6Address(int(address)) if isinstance(address, IPv6Address) else address


def _same_scope(address: Address, own: Address) -> bool:
    scope = address.scope_id if isinstance(address, IPv6Address) else None
    return scope is None or (isinstance(own, IPv6Address) and scope == own.scope_id)


def _source_of(target: Any) -> Address | None:
    """The address that this machine would reach `target` (of getaddrinfo) from; None where it cannot."""
    family, kind, protocol, _, address = target
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return ip_address(probe.getsockname()[0])
    except OSError:
        return None
