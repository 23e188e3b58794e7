"""benchmarks/soak.py: it finds nothing where all is well, and every wrong bit; and what it says then."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

WORLD = 5
KIB, MIB = 1024, 1024 * 1024

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the soak reads /proc")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a program's module as it would itself."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def soak(
    module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs the program with two ranks for a second or two; returns its exit status and its result."""
    program = module("soak")
    monkeypatch.setattr(program, "MOST_NBYTES", MIB)

    def run(*options: str) -> tuple[int, dict[str, Any]]:
        output = tmp_path / "result.json"
        monkeypatch.setattr(sys, "argv", ["soak.py", "--world", "2", "--output", str(output), *options])
        status = program.main()
        return status, json.loads(output.read_text())

    return run


@pytest.fixture
def known_sums(module: Callable[[str], ModuleType]) -> ModuleType:
    """benchmarks/known_sums.py."""
    return module("known_sums")


def reduced(sums: Any, op: Any, ranks: tuple[int, ...] = tuple(range(WORLD))) -> torch.Tensor:
    """What an all-reduce over these ranks leaves."""
    parts = [torch.empty(op.count, dtype=op.dtype) for _ in ranks]
    for rank, part in zip(ranks, parts, strict=True):
        sums.contribute(op, rank, part)
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total


def test_the_sum_is_known_and_any_flipped_bit_is_seen(known_sums: ModuleType) -> None:
    sums = known_sums.KnownSums(WORLD, 2 * known_sums.CHECKED_NBYTES, 3)
    for op in known_sums.largest_ops(WORLD, known_sums.CHECKED_NBYTES + 24, 3):
        total = reduced(sums, op)
        assert sums.wrong_bits(op, total) == 0
        data = total.view(torch.uint8)
        for byte in (0, 1, known_sums.CHECKED_NBYTES - 1, known_sums.CHECKED_NBYTES, op.nbytes - 1):
            for bit in range(8):
                data[byte] ^= 1 << bit
                assert sums.wrong_bits(op, total) == 1
                data[byte] ^= 1 << bit
        assert sums.wrong_bits(op, total) == 0


def test_a_rank_left_out_or_taken_twice_and_an_old_result_are_seen(known_sums: ModuleType) -> None:
    sums = known_sums.KnownSums(WORLD, 64 * KIB, 4)
    for op in itertools.islice(known_sums.draw_ops(WORLD, KIB, 64 * KIB, 4), 50):
        count, addends = op.count, op.addends
        assert sums.wrong_bits(op, reduced(sums, op)) == 0
        assert sums.wrong_bits(op, reduced(sums, op, (0, 1, 2, 3))) > 0
        if addends[1] != addends[2]:
            assert sums.wrong_bits(op, reduced(sums, op, (0, 1, 1, 3, 4))) > 0
        older = type(op)(op.dtype, count, (op.shift + 1) % known_sums.SHIFTS, addends)
        assert sums.wrong_bits(op, reduced(sums, older)) > 0


def test_all_ranks_draw_the_same_ops_of_all_sizes(known_sums: ModuleType) -> None:
    draw = lambda seed: list(itertools.islice(known_sums.draw_ops(8, KIB, 25_000_000, seed), 400))  # noqa: E731
    assert draw(1) == draw(1) != draw(2)
    sizes = [op.nbytes for op in draw(1)]
    assert KIB - 8 < min(sizes) < 4 * KIB and 10_000_000 < max(sizes) <= 25_000_000
    assert {op.dtype for op in draw(1)} == set(known_sums.EXACT)


@linux_only
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_two_ranks_are_right_and_stay_as_large_as_they_are(
    soak: Callable[..., tuple[int, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    transport: str,
) -> None:
    monkeypatch.setenv("MCCL_TRANSPORT", transport)
    status, result = soak("--minutes", "0.03", "--markdown")
    assert (status, result["problems"]) == (0, [])
    assert {"hardware", "system", "commit", "command", "torch", "link"} <= result.keys()
    assert result["transport"] == transport
    one, other = result["rows"]
    assert one["operations"] == other["operations"] >= 32 and one["bytes"] == other["bytes"] > 0
    for row in result["rows"]:
        assert row["wrong_bits"] == 0 and row["seconds"] >= 1.8
        assert 0 < row["checking_cpu_s"] < row["cpu_s"]
        assert row["samples"] and row["before"]["rss_nbytes"] > 10 * MIB
    assert f"| 2 | {one['seconds'] / 60:.1f} | {one['operations']:,} |" in capfd.readouterr().out


@linux_only
def test_one_wrong_bit_of_one_rank_ends_it_with_1(
    soak: Callable[..., tuple[int, dict[str, Any]]],
    known_sums: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    check = known_sums.KnownSums.wrong_bits
    checked = itertools.count()

    def damage_and_check(self: Any, op: Any, tensor: torch.Tensor) -> int:
        if torch.distributed.get_rank() == 1 and next(checked) == 25:
            tensor.view(torch.uint8)[op.nbytes // 2] ^= 16
        return check(self, op, tensor)

    monkeypatch.setattr(known_sums.KnownSums, "wrong_bits", damage_and_check)
    status, result = soak("--minutes", "0.02")
    assert status == 1
    assert [row["wrong_bits"] for row in result["rows"]] == [0, 1]
    [problem] = result["problems"]
    assert problem.startswith("rank 1: 1 wrong bits: op ") and problem in capfd.readouterr().err


def test_growth_is_a_problem(module: Callable[[str], ModuleType]) -> None:
    held = {"rss_nbytes": 300 * MIB, "threads": 6, "descriptors": 30}
    row = {"rank": 3, "wrong_bits": 0, "before": held, "after": held | {"rss_nbytes": 308 * MIB}}
    assert module("soak").problems([row]) == []
    row["after"] = held | {"rss_nbytes": 309 * MIB, "descriptors": 31}
    assert [problem.split(";")[0] for problem in module("soak").problems([row])] == [
        f"rank 3: rss_nbytes grew from {300 * MIB} to {309 * MIB}",
        "rank 3: descriptors grew from 30 to 31",
    ]
