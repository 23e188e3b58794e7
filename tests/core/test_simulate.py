"""The simulator of schedules: against closed forms in C++ (tests/cpp/simulate_test.cpp), and as Python sees it."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from support.cpp import build_program

from mccl_core import _C

ALPHA_S, GOODPUT = 300e-6, 1e9


def simulate(algorithm: str = "ring", **changes: Any) -> _C.Simulation:
    """A small all-reduce on a link of one byte a nanosecond, but for what is changed."""
    arguments: dict[str, Any] = {
        "world": 8,
        "nbytes": [8 * 4],
        "ready_s": [0.0],
        "alpha_s": ALPHA_S,
        "goodput_bytes_per_s": GOODPUT,
        "segment_nbytes": 65536,
        "forward_nbytes": 65536,
        "credit_nbytes": 1 << 22,
    }
    return _C.simulate("all_reduce", algorithm, **(arguments | changes))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_simulator_agrees_with_closed_forms() -> None:
    done = subprocess.run([build_program("simulate_test")], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout


def test_small_all_reduces_take_the_latency_of_their_rounds() -> None:
    assert simulate()["last_finish_s"] == pytest.approx(14 * (ALPHA_S + 4e-9))
    doubling = simulate("recursive_doubling", nbytes=[1000])
    assert doubling["last_finish_s"] == pytest.approx(3 * (ALPHA_S + 1e-6))


def test_ops_start_when_they_are_ready_and_as_many_as_may_be_in_flight() -> None:
    one_s = simulate()["last_finish_s"]
    serial = simulate(nbytes=[32, 32], ready_s=[0.0, one_s / 2], max_in_flight=1)
    assert serial["posted_s"] == pytest.approx([0.0, one_s])
    assert serial["finish_s"] == pytest.approx([one_s, 2 * one_s])
    both = simulate(nbytes=[32, 32], ready_s=[0.0, one_s / 2])
    assert both["finish_s"] == pytest.approx([one_s, 1.5 * one_s])


def test_a_late_rank_and_a_narrow_uplink_are_seen() -> None:
    assert simulate(delay_s=[0.0] * 7 + [0.5])["last_finish_s"] == pytest.approx(simulate()["last_finish_s"] + 0.5)
    wide: dict[str, Any] = {"nbytes": [8_000_000], "groups": [0, 1] * 4, "uplink_goodput_bytes_per_s": 100 * GOODPUT}
    narrow = wide | {"uplink_goodput_bytes_per_s": GOODPUT}
    # Every hop of this ring crosses: four ranks share each uplink.
    ratio = simulate(**narrow)["last_finish_s"] / simulate(**wide)["last_finish_s"]
    assert ratio == pytest.approx(4, rel=0.1)
    assert len(simulate(**narrow)["uplink_busy_share"]) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "guesswork"}, "Choose one of .*ring"),
        ({"goodput_bytes_per_s": 0.0}, "goodput"),
        ({"ready_s": []}, "1 sizes and 0 ready times"),
        ({"delay_s": [0.0]}, "delays for 1 ranks"),
        ({"groups": [0, 1]}, "groups for 2 ranks"),
        ({"segment_nbytes": 0}, "segments"),
        ({"max_in_flight": -1}, "negative"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(**changes)
