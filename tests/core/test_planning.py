"""What the planner chooses, checked against the simulator, and what a step costs by it."""

from __future__ import annotations

import pytest

from mccl_core import explain, links
from mccl_core.config import CoreConfig
from mccl_core.planning import Candidate
from mccl_core.simulation import Backward, simulate_all_reduces, simulate_step

CONFIG = CoreConfig.model_validate({})
BUCKET_NBYTES = 25_000_000


def switches(world: int, count: int) -> list[int]:
    """`count` switches, filled evenly."""
    return [rank * count // world for rank in range(world)]


def chosen(nbytes: int, world: int, groups: list[int] | None = None) -> Candidate:
    names = [str(group) for group in groups or []]
    return explain("all_reduce", nbytes, world, profile=links.ETHERNET_10G, switch_groups=names, config=CONFIG).chosen


@pytest.mark.parametrize(("world", "count"), [(24, 1), (100, 5), (200, 9), (200, 10), (200, 1)])
def test_the_chosen_plan_keeps_95_percent_of_goodput(world: int, count: int) -> None:
    groups = switches(world, count)
    backward = Backward(backward_ms=1090, bucket_count=18, bucket_nbytes=BUCKET_NBYTES)
    plan = chosen(BUCKET_NBYTES, world, groups)
    step = simulate_step(links.ETHERNET_10G, plan, world, backward, group_of_rank=groups)
    assert step.goodput_share >= 0.95
    assert step.step_ms == pytest.approx(1090 + step.exposed_ms)


@pytest.mark.parametrize("count", [5, 9, 10, 20])
def test_the_chunks_of_two_levels_are_worth_it(count: int) -> None:
    groups = switches(200, count)
    plan = chosen(BUCKET_NBYTES, 200, groups)
    assert plan.algorithm == "two_level"

    def time_s(chunks: int) -> float:
        other = Candidate("two_level", chunks, 0)
        result = simulate_all_reduces(links.ETHERNET_10G, other, 200, [BUCKET_NBYTES], [0.0], group_of_rank=groups)
        return result["last_finish_s"]

    assert plan.predicted_ms / 1e3 == pytest.approx(time_s(plan.chunks), rel=0.15)
    assert time_s(plan.chunks) <= 1.03 * min(time_s(chunks) for chunks in range(1, 9))


@pytest.mark.parametrize("world", [100, 200])
def test_many_macs_behind_one_switch_go_in_teams(world: int) -> None:
    plan = chosen(BUCKET_NBYTES, world)
    assert plan.algorithm == "two_level"
    backward = Backward(backward_ms=1090, bucket_count=18, bucket_nbytes=BUCKET_NBYTES)
    one_level = next(
        candidate
        for candidate in explain(
            "all_reduce", BUCKET_NBYTES, world, profile=links.ETHERNET_10G, config=CONFIG
        ).candidates
        if candidate.algorithm == "circulant"
    )
    in_teams, in_one = (simulate_step(links.ETHERNET_10G, each, world, backward) for each in (plan, one_level))
    assert in_teams.step_ms < in_one.step_ms
    # One that they cannot be cut from evenly: 199 is a prime.
    assert "two_level" not in {
        candidate.algorithm for candidate in explain("all_reduce", BUCKET_NBYTES, 199, config=CONFIG).candidates
    }


def test_a_switch_with_a_few_macs_is_no_reason_for_two_levels() -> None:
    filled = [rank // 24 for rank in range(200)]  # the ninth has eight
    assert chosen(BUCKET_NBYTES, 200, filled).algorithm != "two_level"


def test_a_narrow_uplink_is_part_of_a_step() -> None:
    narrow = links.ETHERNET_10G.model_copy(update={"uplink_GBps": 1.238})
    backward = Backward(backward_ms=100, bucket_count=2, bucket_nbytes=4_000_000)
    ring = Candidate("ring", 1, 0)
    mixed = [0, 1] * 4  # every hop crosses, and four ranks share an uplink
    wide_step = simulate_step(links.ETHERNET_10G, ring, 8, backward, group_of_rank=mixed)
    narrow_step = simulate_step(narrow, ring, 8, backward, group_of_rank=mixed)
    assert narrow_step.exposed_ms > 3 * wide_step.exposed_ms
