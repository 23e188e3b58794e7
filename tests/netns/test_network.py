"""Hosts, shaped links, cuts and losses, seen through sockets and iperf3."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from netns import iperf
from netns.host import Host
from netns.iperf import measure_goodput, shape_with_smallest_burst
from netns.network import KIB, MIB, Link, Network
from netns.tools import NetworkError

SEND_ONE = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2])) as peer:
    print(peer.recv(10).decode())
"""
SERVE = """
import socket, sys
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("ready", flush=True)
    while True:
        server.accept()[0].send(b"hello")
"""
COUNT = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
    receiver.bind(("0.0.0.0", 7001))
    print("ready", flush=True)
    print(sum(1 for _ in iter(lambda: receiver.recv(10), b"end")))
"""
SEND_MANY = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    for word in [b"x"] * 200 + [b"end"] * 50:  # one of the last ones will arrive
        sender.sendto(word, (sys.argv[1], 7001))
"""


@pytest.fixture
def pair() -> Iterator[Network]:
    with Network(2) as network:
        yield network


class Server:
    """Says hello to whoever connects to a host."""

    def __init__(self, host: Host) -> None:
        self.process = host.popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"


def greets(client: Host, server: Host, timeout_s: float = 10) -> bool:
    """Whether a connection comes about within the time."""
    try:
        return client.run([sys.executable, "-c", SEND_ONE, server.address, str(timeout_s)]) == "hello\n"
    except NetworkError as error:
        assert "timed out" in str(error) or "No route to host" in str(error), error
        return False


def test_a_command_runs_in_its_host_and_gets_its_signals(pair: Network) -> None:
    host = pair.hosts[1]
    program = "import socket; print(socket.gethostname(), [name for _, name in socket.if_nameindex()])"
    assert host.run([sys.executable, "-c", program]) == "h1 ['lo', 'eth0']\n"
    process = host.popen(["sleep", "1000"])
    process.send_signal(signal.SIGUSR1)
    assert process.wait(10) == -signal.SIGUSR1
    with pytest.raises(NetworkError, match="exit status 3"):
        host.run(["sh", "-c", "exit 3"])


def test_the_machines_own_network_stays_as_it_is() -> None:
    def links() -> str:
        return subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout

    before = links()
    with Network(3):
        assert links() == before


def test_mtu_reaches_every_link() -> None:
    with Network(2, mtu=9000) as network:
        assert "mtu 9000" in network.hosts[0].run(["ip", "link", "show", "eth0"])
        # 8,972 bytes and 28 of headers fit one packet, which must not be cut into pieces; one byte more does not.
        probe = (
            "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM);"
            "s.setsockopt(socket.IPPROTO_IP, 10, 2); print(s.sendto(bytes(int(sys.argv[2])), (sys.argv[1], 7000)))"
        )
        run = [sys.executable, "-c", probe, network.hosts[1].address]
        assert network.hosts[0].run([*run, "8972"]) == "8972\n"
        with pytest.raises(NetworkError, match="Message too long"):
            network.hosts[0].run([*run, "8973"])


def test_a_cut_link_carries_nothing_until_it_is_mended(pair: Network) -> None:
    client, server = pair.hosts
    Server(server)
    assert greets(client, server)
    pair.cut(server)
    assert not greets(client, server, 0.5)
    pair.mend(server)
    assert greets(client, server)


def test_dropping_a_peer_spares_the_others() -> None:
    with Network(3) as network:
        client, other, server = network.hosts
        Server(server)
        network.drop(server, client)
        assert not greets(client, server, 0.5)
        assert greets(other, server)
        network.stop_dropping()
        assert greets(client, server)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1])
def test_a_share_of_packets_is_between_nothing_and_all(pair: Network, share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        pair.drop(pair.hosts[0], share=share)


def test_half_of_the_packets_are_lost_at_random(pair: Network) -> None:
    client, server = pair.hosts
    pair.drop(server, client, share=0.5)
    receiver = server.popen([sys.executable, "-c", COUNT], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    client.run([sys.executable, "-c", SEND_MANY, server.address])
    arrived = int(receiver.communicate(timeout=30)[0])
    assert 50 <= arrived <= 150  # seven standard deviations around 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"host_count": 0}, "host_count"),
        ({"host_count": 4, "groups": (2, 3)}, "groups"),
        ({"host_count": 2, "mtu": 100}, "mtu"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Network(**arguments)


def test_switch_groups_are_parted_and_joined() -> None:
    with Network(4, groups=(2, 2)) as network:
        near, server, far = network.hosts[0], network.hosts[1], network.hosts[2]
        Server(server)
        assert greets(near, server) and greets(far, server)
        network.cut_uplink(1)
        assert greets(near, server)
        assert not greets(far, server, 0.5)
        network.mend_uplink(1)
        assert greets(far, server)


def test_a_failure_while_it_is_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(3)
    monkeypatch.setattr(network, "_bridge_of", lambda index: f"bridge{index}")  # bridge1 does not exist
    with pytest.raises(NetworkError, match="bridge1"):
        network.start()
    assert not [host for host in network.hosts if host.namespace in namespaces()]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_inside_leaves_no_namespace_and_no_process(error: type[BaseException]) -> None:
    with pytest.raises(error), Network(2) as network:
        process = network.hosts[0].popen(["sleep", "1000"])
        raise error
    assert process.wait(10) == -signal.SIGKILL
    assert not [host for host in network.hosts if host.namespace in namespaces()]


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_a_forked_child_removes_nothing(pair: Network) -> None:
    pid = os.fork()
    if pid == 0:
        pair.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert all(host.namespace in namespaces() for host in pair.hosts)


@pytest.mark.alone
@pytest.mark.slow
def test_a_link_is_as_fast_as_it_is_shaped_in_each_direction(pair: Network) -> None:
    first, second = pair.hosts
    # Both ends are shaped, so one of them alone sets the rate of either direction.
    pair.shape(Link(rate_mbit=100, burst_nbytes=72 * KIB), first)
    fast = [measure_goodput(*ends, seconds=2) for ends in ((first, second), (second, first))]
    pair.shape(Link(rate_mbit=25, burst_nbytes=72 * KIB), first)
    slow = [measure_goodput(*ends, seconds=2) for ends in ((first, second), (second, first))]
    for whole, quarter in zip(fast, slow, strict=True):
        assert 3.4 <= whole / quarter <= 4.4
        assert quarter <= 1.05 * Link(25, 72 * KIB).goodput(1500)


@pytest.mark.alone
@pytest.mark.slow
def test_an_uplink_is_shared_by_its_group() -> None:
    with Network(4, groups=(2, 2)) as network:
        network.shape(Link(rate_mbit=100, burst_nbytes=72 * KIB))
        network.shape_uplink(Link(rate_mbit=25, burst_nbytes=72 * KIB))
        within = measure_goodput(network.hosts[0], network.hosts[1], seconds=2)
        across = measure_goodput(network.hosts[0], network.hosts[2], seconds=2)
        assert 3.4 <= within / across <= 4.4


@pytest.mark.alone
@pytest.mark.slow
def test_the_burst_that_is_found_holds_the_rate_as_a_generous_one_does(pair: Network) -> None:
    link = shape_with_smallest_burst(pair, 100)
    found = measure_goodput(*pair.hosts, seconds=2, omit_s=1)
    pair.shape(Link(link.rate_mbit, MIB))
    generous = measure_goodput(*pair.hosts, seconds=2, omit_s=1)
    assert found >= 0.85 * generous


@pytest.mark.alone
@pytest.mark.slow
def test_a_rate_that_no_burst_holds_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iperf, "BURSTS", [16 * KIB])
    with Network(2) as network, pytest.raises(NetworkError, match=r"100000 Mbit/s.*give a burst"):
        shape_with_smallest_burst(network, 100_000)
