"""A thousand strangers at the ranks' ports, during start-up and during training: nobody notices."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import results_of
from torch.nn.parallel import DistributedDataParallel

from mccl_core import explain_network
from netns.network import KIB, MIB, Link, Network
from netns.ranks import ranks_on
from netns.strangers import Strangers
from netns.tools import run_tool
from netns.waiting import wait_until

WORLD = 4
PORT = 29600
STRANGERS = 1000
REPORT_S = 200.0


@pytest.fixture
def network() -> Iterator[Network]:
    """Four hosts for the ranks, and one for the strangers."""
    with Network(WORLD + 1) as network:
        yield network


def targets(network: Network) -> list[tuple[str, int]]:
    return [(host.address, PORT) for host in network.hosts[:WORLD]]


def train(rank: int, world: int, steps: int = 40) -> tuple[float, list[torch.Tensor]]:
    """Trains a small model with DDP; returns when the group was there, and the weights in the end."""
    started_at = time.monotonic()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        inputs = torch.randn(16, 64, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs).square().mean().backward()
        optimizer.step()
    return started_at, [parameter.detach().clone() for parameter in model.parameters()]


def train_on(network: Network, **env: str) -> tuple[float, list[list[torch.Tensor]]]:
    """How long it took from the start of the processes to the last rank's group, in seconds; all ranks' weights."""
    start = time.monotonic()
    with ranks_on(network.hosts[:WORLD], train, **env) as ranks:
        results = results_of(ranks.outcomes(REPORT_S))
        ranks.let_go(20)
    return max(at for at, _ in results) - start, [weights for _, weights in results]


@pytest.mark.slow
def test_training_starts_and_ends_with_the_same_bits_under_a_storm(network: Network) -> None:
    calm_s, calm = train_on(network)
    # Those that are dropped come again at once, from before the first rank listens to after the last has left.
    with Strangers(network.hosts[WORLD], targets(network), count=STRANGERS, again=True) as strangers, strangers.storm():
        wait_until(lambda: strangers.dialled.value > 100, "strangers dial")
        storm_s, stormed = train_on(network)
        opened = strangers.opened.value
    print(f"\nstart-up: {calm_s:.2f} s, with {opened} strangers {storm_s:.2f} s")
    assert opened >= STRANGERS
    for rank in range(WORLD):
        assert all(torch.equal(a, b) for a, b in zip(stormed[rank], calm[0], strict=True))
    assert storm_s - calm_s < 10  # a second, and room for a busy machine


def reduce_in_windows(rank: int, world: int, strangers: Strangers, pairs: int, window_s: float) -> list[float]:
    """Bytes all-reduced a second in each window, calm and stormy in turns; every result is checked.

    Two are in flight at once, as DDP has them, so that the link has work while a result is checked. A stormy window
    lasts until all of its strangers have been connected.
    """
    generator = torch.Generator().manual_seed(0)
    values = [torch.randint(-1000, 1000, (MIB // 4,), generator=generator).float() for _ in range(2)]
    rates = []
    for window in range(2 * pairs):
        dist.barrier()
        stormy = window % 2 == 1
        if rank == 0 and stormy:
            strangers.storming.set()
        start, nbytes, more = time.monotonic(), 0, torch.ones(1)
        while more.item() > 0:
            tensors = [each * (rank + 1) for each in values]
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for work, tensor, each in zip(works, tensors, values, strict=True):
                work.wait()
                assert torch.equal(tensor, each * (world * (world + 1) // 2))
                nbytes += tensor.nbytes
            # Rank 0 says when the window is over.
            all_came = not stormy or strangers.opened.value >= (window // 2 + 1) * STRANGERS
            more.fill_(float(time.monotonic() - start < window_s or not all_came))
            dist.broadcast(more, 0)
        rates.append(nbytes / (time.monotonic() - start))
        if rank == 0:
            strangers.storming.clear()
    return rates


@pytest.mark.alone
@pytest.mark.slow
def test_a_storm_during_training_costs_little_throughput(network: Network) -> None:
    # The link is to limit, not the processors, which the ranks share with the strangers' own process. So it is slow,
    # and its burst holds what TCP hands over at once: cut into frames that would cost several times as much.
    link = Link(rate_mbit=100, burst_nbytes=72 * KIB)
    network.shape(link, *network.hosts)
    pairs = 8
    strangers = Strangers(network.hosts[WORLD], targets(network), count=STRANGERS, again=False)
    with strangers, ranks_on(network.hosts[:WORLD], reduce_in_windows, strangers, pairs, 3.0) as ranks:
        rates = results_of(ranks.outcomes(REPORT_S))[0]
        ranks.let_go(20)
    calm, stormy = rates[::2], rates[1::2]
    around = [(a + b) / 2 for a, b in zip(calm, [*calm[1:], calm[-1]], strict=True)]
    ratio = statistics.median(s / c for s, c in zip(stormy, around, strict=True))
    noise = statistics.median(abs(b / a - 1) for a, b in itertools.pairwise(calm))
    used = statistics.median(calm) * 2 * (WORLD - 1) / WORLD / 1e9 / link.goodput(1500)
    print(f"\nMB all-reduced a second: {[round(rate / 1e6, 2) for rate in rates]}")
    print(
        f"stormy/calm {ratio:.3f}; a calm window differs from the next by {noise:.1%} and fills {used:.0%} of the link"
    )
    assert strangers.opened.value == pairs * STRANGERS
    assert ratio > 0.95


def listening_addresses() -> set[str]:
    """The local addresses of this namespace's listening TCP sockets on mccl's ports."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        address, port = line.split()[1].split(":")
        if line.split()[3] == "0A" and PORT <= int(port, 16) < PORT + 100:
            found.add(".".join(str(octet) for octet in reversed(bytes.fromhex(address))))
    return found


def where(rank: int, world: int) -> tuple[Any, set[str]]:
    dist.all_reduce(torch.ones(1))
    return explain_network(), listening_addresses()


def test_listeners_bind_the_chosen_interface_only(network: Network) -> None:
    hosts = network.hosts[:2]
    for host in hosts:  # a second interface, which nobody asked for
        run_tool("ip", "-n", host.namespace, "link", "add", "eth1", "type", "veth", "peer", "name", "other")
        run_tool("ip", "-n", host.namespace, "address", "add", "10.9.0.1/24", "dev", "eth1")
        run_tool("ip", "-n", host.namespace, "link", "set", "eth1", "up")
    with ranks_on(hosts, where) as ranks:
        results = results_of(ranks.outcomes(60))
        ranks.let_go(10)
    for host, (choice, listening) in zip(hosts, results, strict=True):
        assert listening == {host.address}
        assert (choice.address, choice.interface, choice.port) == (host.address, "eth0", PORT)
        assert choice.reason == f"the route to {hosts[0].address} leaves from there"
        assert [interface.name for interface in choice.interfaces] == ["lo", "eth0", "eth1"]


def over_link_local_ipv6(rank: int, world: int) -> str:
    os.environ["MCCL_LISTEN_ADDR"] = f"fe80::{rank + 1}"
    group = dist.new_group(backend="mccl")
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor, group=group)
    assert tensor[0].item() == world
    return explain_network().address


def test_ranks_meet_over_link_local_ipv6(network: Network) -> None:
    hosts = network.hosts[:3]
    for number, host in enumerate(hosts):
        run_tool("ip", "-n", host.namespace, "address", "add", f"fe80::{number + 1}/64", "dev", "eth0", "nodad")
    with ranks_on(hosts, over_link_local_ipv6, backend="gloo") as ranks:
        addresses = results_of(ranks.outcomes(60))
        ranks.let_go(10)
    assert addresses == ["fe80::1%eth0", "fe80::2%eth0", "fe80::3%eth0"]
