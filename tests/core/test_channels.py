"""Collectives over several channels: exact, the same bits on every rank, and no other faults than on one channel."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, run_ranks_to_the_end

from mccl_core import _runtime, explain, links
from mccl_core.config import KIB, MIB, CoreConfig

CHANNELS = 3
# Parts are small, so that small tensors go over channels, too.
SETTINGS = {"MCCL_CHANNELS": str(CHANNELS), "MCCL_CHANNEL_NBYTES": "4096"}
ELEMENTS = 1_000_003


def lanes_met() -> set[int]:
    """Lanes on which this process has been connected to another."""
    runtime = _runtime.current_runtime()
    assert runtime is not None
    return {lane for _, lane in runtime._met}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def collectives(rank: int, world: int) -> tuple[set[int], set[int], list[str]]:
    dist.barrier()
    lanes_before = lanes_met()
    ones = (torch.arange(ELEMENTS) % 251).float()
    gathered = torch.empty(world * ELEMENTS)
    dist.all_gather_into_tensor(gathered, ones + rank)
    assert torch.equal(gathered, torch.cat([ones + r for r in range(world)]))
    scattered = torch.empty(ELEMENTS)
    dist.reduce_scatter_tensor(scattered, torch.cat([ones * (r + 1) for r in range(world)]) + rank)
    assert torch.equal(scattered, ones * (rank + 1) * world + sum(range(world)))
    digests = []
    for _ in range(2):
        works, tensors = [], []
        for seed in range(8):
            numbers = torch.randn(ELEMENTS // (1 + seed), generator=torch.Generator().manual_seed(seed * world + rank))
            works.append(dist.all_reduce(numbers, async_op=True))
            tensors.append(numbers)
        for work in works:
            work.wait()
        digests.append(digest(torch.cat(tensors)))
    exact = sum(
        torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(r), dtype=torch.float32).double()
        for r in range(world)
    )
    torch.testing.assert_close(tensors[0].double(), exact, rtol=0, atol=1e-5)
    return lanes_before, lanes_met(), digests


@pytest.mark.parametrize("algorithm", ["ring", "circulant"])
@pytest.mark.parametrize(("world", "sockets"), [(2, "auto"), (2, "tcp"), (3, "tcp")])
def test_results_are_exact_and_the_same_everywhere(world: int, sockets: str, algorithm: str) -> None:
    settings = {"MCCL_ALLREDUCE_ALGO": algorithm, "MCCL_TRANSPORT": sockets, **SETTINGS}
    outcomes = run_ranks(world, collectives, **settings)
    assert len({text for _, _, digests in outcomes for text in digests}) == 1, "ranks or runs differ"
    for before, after, _ in outcomes:
        assert before == ({0, 1} if world == 2 else {0}), "further channels are connected when first needed"
        assert after == set(range(2 * CHANNELS)) if world == 2 else {0, 2, 4}


def groups_that_come_and_go(rank: int, world: int) -> None:
    for _ in range(10):
        group = dist.new_group(backend="mccl")
        tensor = torch.full((100_000,), 1.0 + rank)
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group(group)  # at once: others may still be receiving
        assert torch.equal(tensor, torch.full((100_000,), world * (world + 1) / 2))


def test_a_rank_that_leaves_in_good_order_is_not_missed() -> None:
    run_ranks(4, groups_that_come_and_go, backend="gloo", **SETTINGS)


def different_channels(rank: int, world: int) -> str:
    os.environ["MCCL_CHANNELS"] = "2" if rank == 1 else "1"
    group = dist.new_group(backend="mccl")
    with pytest.raises(dist.DistBackendError) as info:
        dist.all_reduce(torch.ones(ELEMENTS), group=group)
    return str(info.value)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_other_channels_get_an_error_that_names_both(world: int) -> None:
    settings = {"MCCL_CHANNEL_NBYTES": "4096", "MCCL_ALLREDUCE_ALGO": "ring"}
    texts = run_ranks(world, different_channels, backend="gloo", **settings)
    for text in texts:
        assert "rank 1" in text
        assert "where rank" in text
        assert "on 2 channels" in text
    assert any("MCCL_CHANNELS" in text for text in texts), "whoever saw it says what to do"


def killed_peer(rank: int, world: int) -> tuple[str, float]:
    dist.all_reduce(torch.ones(ELEMENTS))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as info:
        while True:
            dist.all_reduce(torch.ones(ELEMENTS))
    return str(info.value), time.monotonic() - start


@pytest.mark.parametrize("sockets", ["auto", "tcp"])
def test_a_killed_rank_is_named_by_all_others_soon(sockets: str) -> None:
    outcomes = run_ranks_to_the_end(4, killed_peer, MCCL_TRANSPORT=sockets, **SETTINGS)
    for rank in (0, 1, 3):
        assert outcomes[rank].text == "", outcomes[rank].text
        text, took_s = outcomes[rank].result
        assert "rank 2" in text
        assert took_s < 5.0


def chosen(nbytes: int, *, channels: int | None = None, collective: str = "all_reduce") -> int:
    config = CoreConfig.model_validate({"channels": channels})
    profile = links.LinkProfile(latency_us=10, step_us=20, goodput_GBps=3)
    return explain(collective, nbytes, 8, profile=profile, config=config).chosen.channels  # type: ignore[arg-type]


def test_the_planner_spreads_what_is_large_enough() -> None:
    assert chosen(256 * MIB) == 1
    assert chosen(256 * MIB, channels=2) == 2
    assert chosen(500 * KIB, channels=2) == 1, "each of two channels would get less than MCCL_CHANNEL_NBYTES"
    assert chosen(256 * MIB, channels=8) == 8
    assert chosen(KIB, channels=8) == 1
    for collective in ("all_gather", "reduce_scatter"):
        assert chosen(32 * MIB, channels=2, collective=collective) == 2
        assert chosen(16 * KIB, channels=2, collective=collective) == 1


def test_channels_do_not_help_against_latency() -> None:
    config = CoreConfig.model_validate({"channels": 2, "channel_nbytes": KIB, "allreduce_algo": "ring"})
    far = links.LinkProfile(latency_us=5000, step_us=20, goodput_GBps=3)
    plan = explain("all_reduce", MIB, 4, profile=far, config=config).chosen
    assert plan.channels == 1


def test_the_profile_sets_the_default() -> None:
    profile = links.LOOPBACK.model_copy(update={"channels": 4})
    explanation = explain("all_reduce", 256 * MIB, 2, profile=profile, config=CoreConfig.model_validate({}))
    assert explanation.chosen.channels == 4
    assert "on 4 channels" in str(explanation)
    assert {candidate.channels for candidate in explanation.candidates} == {1, 4}


@pytest.mark.parametrize("value", ["0", "9", "two"])
def test_a_number_of_channels_that_cannot_be_is_refused(value: str) -> None:
    check: Callable[[], object] = lambda: CoreConfig.from_environment({"MCCL_CHANNELS": value})  # noqa: E731
    with pytest.raises(ValueError, match="MCCL_CHANNELS"):
        check()
