"""Which address a rank listens on: what was asked for, a Thunderbolt bridge, or the route to the store's host."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from ipaddress import ip_address
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, run_ranks_to_the_end

from mccl_core import explain_network
from mccl_core._interfaces import Interface, list_interfaces
from mccl_core._network import NetworkChoice, NetworkError, choose
from mccl_core.config import CoreConfig


def interface(name: str, *addresses: str) -> Interface:
    return Interface(name, tuple(map(ip_address, addresses)))


LOOPBACK = interface("lo0", "127.0.0.1", "::1", "fe80::1%lo0")
ETHERNET = interface("en0", "10.1.0.5", "fd00::5", "fe80::5%en0")
BRIDGE = interface("bridge0", "169.254.7.5")
UNCONFIGURED = interface("en7", "169.254.99.1")  # no DHCP server answered: such an address, but no bridge
MAC = (LOOPBACK, ETHERNET, UNCONFIGURED, BRIDGE)


class Routes:
    """A machine's routing table: which source address a destination is reached from."""

    def __init__(self, table: dict[str, str], names: dict[str, list[str]] | None = None) -> None:
        self.table = table
        self.names = names or {}

    def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        addresses = self.names.get(host, [host])
        families = [socket.AF_INET if ip_address(a).version == 4 else socket.AF_INET6 for a in addresses]
        return [(f, socket.SOCK_DGRAM, 0, "", (a, port)) for f, a in zip(families, addresses, strict=True)]


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> Routes:
    routes = Routes({"10.1.0.1": "10.1.0.5", "169.254.7.1": "169.254.7.5", "127.0.0.1": "127.0.0.1"})
    monkeypatch.setattr("mccl_core._network.socket.getaddrinfo", routes.getaddrinfo)

    def source_of(target: Any) -> Any:
        source = routes.table.get(target[4][0])
        return None if source is None else ip_address(source)

    monkeypatch.setattr("mccl_core._network._source_of", source_of)
    return routes


def chosen(host: str, **settings: str) -> NetworkChoice:
    return choose(CoreConfig.model_validate(settings), host, MAC)


def test_the_route_to_the_master_decides(routes: Routes) -> None:
    choice = chosen("10.1.0.1")
    assert (choice.address, choice.interface) == ("10.1.0.5", "en0")
    assert choice.reason == "the route to 10.1.0.1 leaves from there"
    assert chosen("127.0.0.1").interface == "lo0"


def test_a_thunderbolt_bridge_is_preferred_where_the_master_is_on_one(routes: Routes) -> None:
    routes.names["studio.local"] = ["10.1.0.1", "169.254.7.1"]
    choice = chosen("studio.local")
    assert (choice.address, choice.interface) == ("169.254.7.5", "bridge0")
    assert "Thunderbolt" in choice.reason


def test_the_bridge_is_taken_even_if_the_route_leaves_from_another_interface(routes: Routes) -> None:
    for wrong in ("10.1.0.5", "169.254.99.1"):
        routes.table["169.254.7.1"] = wrong
        expected = "en7" if wrong == "169.254.99.1" else "bridge0"  # a link-local route is believed
        assert chosen("169.254.7.1").interface == expected


def test_without_a_bridge_of_its_own_a_machine_takes_its_route(routes: Routes) -> None:
    routes.names["studio.local"] = ["169.254.7.1", "10.1.0.1"]
    del routes.table["169.254.7.1"]
    choice = choose(CoreConfig(), "studio.local", (LOOPBACK, ETHERNET))
    assert choice.interface == "en0"


@pytest.mark.parametrize(
    ("ifname", "host", "address"),
    [
        ("en0", "10.1.0.1", "10.1.0.5"),
        ("bridge0", "10.1.0.1", "169.254.7.5"),
        ("wg0,en0", "10.1.0.1", "10.1.0.5"),
        ("en0", "fd00::1", "fd00::5"),
    ],
)
def test_an_interface_can_be_asked_for(ifname: str, host: str, address: str) -> None:
    choice = chosen(host, ifname=ifname)
    assert choice.address == address and "MCCL_IFNAME" in choice.reason


def test_a_link_local_address_keeps_its_interface() -> None:
    only = interface("en3", "fe80::3%en3")
    assert choose(CoreConfig(ifname="en3"), "fe80::1", (only,)).address == "fe80::3%en3"
    assert choose(CoreConfig(listen_addr="fe80::3"), "fe80::1", (only,)).address == "fe80::3%en3"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ifname": "en9"}, r"ifname \(MCCL_IFNAME\): no interface 'en9'"),
        ({"listen_addr": "10.9.9.9"}, r"MCCL_LISTEN_ADDR\): 10.9.9.9 is no address of this machine"),
        ({"listen_addr": "0.0.0.0"}, r"MCCL_LISTEN_ADDR\): 0.0.0.0 is every interface; name one"),
        ({"listen_addr": "studio"}, r"MCCL_LISTEN_ADDR\): 'studio' is not an IP address"),
        ({"listen_addr": "10.1.0.5", "ifname": "bridge0"}, r"10.1.0.5 is on en0, but ifname \(MCCL_IFNAME\)"),
    ],
)
def test_an_error_names_the_variable_and_lists_the_interfaces(settings: dict[str, str], message: str) -> None:
    with pytest.raises(NetworkError, match=message) as info:
        chosen("10.1.0.1", **settings)
    assert "en0 (10.1.0.5, fd00::5, fe80::5%en0); en7 (169.254.99.1); bridge0 (169.254.7.5)" in str(info.value)


def test_no_route_is_a_clear_error(routes: Routes) -> None:
    with pytest.raises(NetworkError, match=r"no route to the store's host '10.2.0.1'.*MCCL_IFNAME.*en0"):
        chosen("10.2.0.1")


def test_a_choice_reads_well(routes: Routes) -> None:
    assert str(chosen("10.1.0.1")).splitlines() == [
        "listens on 10.1.0.5 on en0: the route to 10.1.0.1 leaves from there",
        "store's host: 10.1.0.1",
        "interfaces:",
        "     lo0 (127.0.0.1, ::1, fe80::1%lo0)",
        "  -> en0 (10.1.0.5, fd00::5, fe80::5%en0)",
        "     en7 (169.254.99.1)",
        "     bridge0 (169.254.7.5)",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="compares with `ip`, which is Linux's")
def test_the_interfaces_are_those_that_the_system_lists() -> None:
    listed = json.loads(subprocess.run(["ip", "-j", "address"], capture_output=True, check=True, text=True).stdout)
    expected = {
        link["ifname"]: {info["local"] for info in link["addr_info"]} for link in listed if "UP" in link["flags"]
    }
    found = {each.name: {str(a).partition("%")[0] for a in each.addresses} for each in list_interfaces()}
    assert found == expected


def where(rank: int, world: int) -> tuple[str, int | None, str]:
    dist.all_reduce(torch.ones(1))
    choice = explain_network()
    return choice.address, choice.port, choice.reason


def test_a_running_process_says_where_it_listens() -> None:
    for address, port, reason in run_ranks(2, where, MCCL_PORT_BASE="29650"):
        assert address == "127.0.0.1" and port is not None and port >= 29650 and "route" in reason


def by_local_rank(rank: int, world: int) -> None:
    os.environ["LOCAL_RANK"] = str(100 * rank)
    dist.new_group(backend="mccl")
    port = explain_network().port
    assert port is not None and 30_100 + 100 * rank <= port < 30_200 + 100 * rank


def test_ports_start_from_the_local_rank() -> None:
    run_ranks(2, by_local_rank, backend="gloo", MCCL_PORT_BASE="30100")


def on_ipv6(rank: int, world: int) -> str:
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    assert tensor[0].item() == world
    return explain_network().address


def test_ranks_meet_over_ipv6() -> None:
    assert run_ranks(3, on_ipv6, MCCL_LISTEN_ADDR="::1", MCCL_TRANSPORT="tcp") == ["::1"] * 3


def test_a_rank_that_cannot_listen_tells_all_others_at_once() -> None:
    def body(rank: int, world: int) -> None:
        if rank == 1:
            os.environ["MCCL_IFNAME"] = "en99"
        dist.new_group(backend="mccl")

    outcomes = run_ranks_to_the_end(3, body, backend="gloo", timeout_s=60)
    for outcome in outcomes:
        assert isinstance(outcome.error, dist.DistBackendError)
        assert "MCCL_IFNAME" in outcome.text and "en99" in outcome.text and "lo (127.0.0.1" in outcome.text
    assert all("rank 1 could not join" in outcomes[rank].text for rank in (0, 2))
