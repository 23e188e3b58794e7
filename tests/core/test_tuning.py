"""Measuring a link: the fit against profiles that are known, and the whole way with real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from support.ranks import run_ranks

from mccl_core import explain, links, tuning
from mccl_core.config import KIB, MIB, CoreConfig
from mccl_core.links import LinkProfile
from mccl_core.tuning import Point, Tuning

CONFIG = CoreConfig.model_validate({})
ETHERNET = LinkProfile(latency_us=306, step_us=15, goodput_GBps=1.238, circulant_share=0.86)
LOOPBACK = LinkProfile(latency_us=10, step_us=20, goodput_GBps=3, circulant_share=0.9)


def points_on(profile: LinkProfile, world: int) -> list[Point]:
    """What would be measured on exactly this link."""
    return [
        Point(candidate.algorithm, nbytes, candidate.predicted_ms)
        for nbytes in (KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
        for candidate in explain("all_reduce", nbytes, world, profile=profile, config=CONFIG).candidates
    ]


@pytest.mark.parametrize("profile", [ETHERNET, LOOPBACK])
@pytest.mark.parametrize("world", [2, 4, 7])
def test_a_fit_finds_the_link_that_made_the_points(profile: LinkProfile, world: int) -> None:
    found = tuning.fit(points_on(profile, world), world, config=CONFIG)
    assert found.latency_us == pytest.approx(profile.latency_us, rel=0.05)
    assert found.step_us == pytest.approx(profile.step_us, rel=0.1)
    assert found.goodput_GBps == pytest.approx(profile.goodput_GBps, rel=0.02)
    # With two ranks circulant is the ring: nothing can tell its share.
    expected = profile.circulant_share if world > 2 else links.ETHERNET_10G.circulant_share
    assert found.circulant_share == pytest.approx(expected, rel=0.02)


def test_a_fit_refuses_points_that_cannot_tell() -> None:
    ring = [Point("ring", KIB, 1.0), Point("ring", MIB, 2.0)]
    with pytest.raises(ValueError, match="two sizes by two algorithms"):
        tuning.fit(ring, 2)
    with pytest.raises(ValueError, match="two sizes by two algorithms"):
        tuning.fit([ring[0], Point("recursive_doubling", KIB, 1.0)], 2)


def test_what_is_written_can_be_loaded(tmp_path: Path) -> None:
    measured = Tuning(ETHERNET, 4, ("mac-1", "mac-2", "mac-1", "mac-2"), (Point("ring", KIB, 1.0),), (-0.25,))
    file = tmp_path / "link.yaml"
    file.write_text(tuning.describe(measured, command="tune --it", when="today", version="1.2"))
    assert links.load(str(file)) == ETHERNET
    text = file.read_text()
    assert text.startswith("# Link profile, measured today by mccl-fleet 1.2: tune --it\n# 4 ranks on mac-1, mac-2;")
    assert "circulant_share is not measured" in text


def measure(rank: int, world: int) -> Tuning:
    before = dict(os.environ)
    measured = tuning.measure(seconds=0.02)
    assert dict(os.environ) == before
    dist.barrier()  # the default group still works
    return measured


def test_all_ranks_measure_and_agree() -> None:
    results = run_ranks(3, measure, MCCL_HOST_NAME="here")
    assert results[1:] == results[:-1]
    measured = results[0]
    assert measured.hosts == ("here",) * 3
    assert {point.algorithm for point in measured.points} == {"ring", "recursive_doubling", "circulant"}
    assert all(point.ms > 0 for point in measured.points)
    # Memory cannot be that slow, nor a system call that fast.
    assert 0.01 < measured.profile.goodput_GBps < 200
    assert measured.profile.latency_us + measured.profile.step_us > 0.1


def alone(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="at least two ranks"):
        tuning.measure()


def test_one_rank_has_no_link() -> None:
    run_ranks(1, alone)


@pytest.mark.slow
def test_torchrun_writes_a_profile_that_loads(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    file = tmp_path / "link.yaml"
    done = subprocess.run(
        [*command, "-m", "mccl_core.tune", "--output", str(file), "--seconds", "0.02"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert links.load(str(file)).goodput_GBps > 0
    assert "python -m mccl_core.tune --output" in file.read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "no/such/folder/file"], "--output: there is no folder"),
        (["--seconds", "0"], "--seconds: 0 is not within"),
        ([], "start it with torchrun"),
    ],
)
def test_the_program_says_what_is_wrong(arguments: list[str], message: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, "-m", "mccl_core.tune", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode == 2
    assert message in done.stderr
