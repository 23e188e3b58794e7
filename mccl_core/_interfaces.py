"""The network interfaces of this machine and their addresses, from getifaddrs(3), on Linux and macOS."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

Address = IPv4Address | IPv6Address

_IFF_UP = 0x1  # the same on both systems


class _IfAddrs(ctypes.Structure):
    """The first fields of struct ifaddrs; the rest is not looked at."""


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


@dataclass(frozen=True)
class Interface:
    """A network interface that is up, and its addresses in the system's order."""

    name: str
    addresses: tuple[Address, ...]

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(map(str, self.addresses)) or 'no address'})"


def list_interfaces() -> tuple[Interface, ...]:
    """The interfaces that are up, by name in the system's order. Link-local IPv6 addresses carry their scope.

    Raises:
        OSError: the system did not tell.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    addresses: dict[str, list[Address]] = {}
    try:
        entry = head
        while entry:
            item = entry.contents
            if item.flags & _IFF_UP:
                name = os.fsdecode(item.name)
                known = addresses.setdefault(name, [])
                address = _address(item.address, name)
                if address is not None and address not in known:
                    known.append(address)
            entry = item.next
    finally:
        libc.freeifaddrs(head)
    return tuple(Interface(name, tuple(known)) for name, known in addresses.items())


def _address(sockaddr: int | None, interface: str) -> Address | None:
    """The address in a struct sockaddr_in or sockaddr_in6; None for any other family."""
    if not sockaddr:
        return None
    head = ctypes.string_at(sockaddr, 2)
    family = head[1] if sys.platform == "darwin" else int.from_bytes(head, sys.byteorder)  # a BSD has its length first
    if family == socket.AF_INET:
        return ip_address(ctypes.string_at(sockaddr + 4, 4))
    if family != socket.AF_INET6:
        return None
    raw = bytearray(ctypes.string_at(sockaddr + 8, 16))
    address = IPv6Address(bytes(raw))
    if not address.is_link_local:
        return address
    raw[2:4] = b"\0\0"  # where a BSD kernel keeps the scope
    return IPv6Address(f"{IPv6Address(bytes(raw))}%{interface}")
