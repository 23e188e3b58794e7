"""The bare pump of benchmarks/tcp_limit.py, and its table."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

KIB, MIB = 1024, 1024 * 1024


@pytest.fixture
def tcp_limit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("tcp_limit")


@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest.mark.parametrize("nbytes", [256 * KIB, MIB + 4, 3 * MIB])
def test_the_pump_moves_all_bytes(
    tcp_limit: ModuleType, kind: str, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_limit, "PUMPED_NBYTES", 9 * MIB + 12)
    assert tcp_limit.pump(kind, nbytes) > 0  # and both of its processes have ended


def test_shares_are_of_gloo(tcp_limit: ModuleType) -> None:
    row = {"world": 2, "bytes": 64 * MIB, "bare_tcp": 1.5, "mccl_tcp": 1.6, "bare_unix": 0.8, "mccl_unix": 1.0}
    assert tcp_limit.table([row | {"gloo_tcp": 2.0}]).splitlines()[-1] == (
        "| 2 | 64 | 1.50 (75%) | 1.60 (80%) | 0.80 (40%) | 1.00 (50%) | 2.00 (100%) |"
    )
