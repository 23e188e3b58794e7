"""The blocks in turns of benchmarks/overheads.py, and what it builds."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from support.cpp import build_program


@pytest.fixture
def overheads(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("overheads")


def test_every_interval_has_a_time_for_each_round(overheads: ModuleType) -> None:
    times = overheads.measure_intervals(2, 1024, 0.001, 3)
    assert list(times) == list(overheads.INTERVALS_MS)
    assert all(len(of_interval) == 3 and min(of_interval) > 0 for of_interval in times.values())


@pytest.mark.slow
def test_recording_an_op_takes_some_time(overheads: ModuleType) -> None:
    recorded = overheads.recording_ns(build_program("overheads"))
    assert set(recorded) == {"metrics", "flight_record"}
    assert all(0 < cost_ns < 1e6 for cost_ns in recorded.values())
