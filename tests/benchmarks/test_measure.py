"""How often the benchmarks repeat what they measure."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_bursts_count_only_where_the_shaper_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import measure

    plan = measure.Plan((), 1.0, min_wire_nbytes=100 * 30_000, burst_nbytes=30_000)
    # Of 24 ranks each sends 23/12 of the bytes.
    assert plan.least_batches(1_200, 24) == measure.MIN_BATCHES  # 2,300 bytes
    assert plan.least_batches(120_000, 24) == 14  # 230,000 bytes: 13 would move 99.7 bursts
    assert plan.least_batches(12_000_000, 24) == 1
    together = measure.Plan((), 1.0, in_flight=100, min_wire_nbytes=100 * 30_000, burst_nbytes=30_000)
    assert together.least_batches(1_200, 24) == 14  # all of a batch is on the wire at once
    assert measure.Plan((), 1.0).least_batches(1_200, 24) == 0  # no shaper
