"""Options that cannot be are refused before anything is measured, with what would do."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a program as a script would see it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


BAD_EVERYWHERE = [
    (["--sizes", "6"], "multiple of 4"),
    (["--sizes", "0"], "between 4"),
    (["--in-flight", "0"], "between 1"),
    (["--in-flight", "many"], "'many' is not a whole number"),
    (["--seconds", "nan"], "not a number of seconds above 0"),
    (["--output", "/nowhere/result.json"], "/nowhere is no folder"),
    (["--world", "1"], "between 2"),
]
BAD_LINKS = [
    (["--rate", "-5"], "not a number of Mbit/s above 0"),
    (["--mtu", "70000"], "between 576 and 65535"),
    (["--mtu", "9000", "--burst", "4096"], "--burst: 4096 bytes do not hold one frame of 9014"),
    (["--mtu", "9000", "--queue", "4096"], "--queue: 4096 bytes do not hold one frame of 9014"),
    (["--iperf-seconds", "0.5"], "not a whole number"),
    (["--limit", "0"], "not a number of seconds above 0"),
]
BAD_LIMITS = [
    (["--in-flight", "2"], "one all-reduce at a time"),
    (["--sizes", "1024"], "at least 262144 bytes"),
    (["--rounds", "0"], "between 1"),
]
BAD_SOAKS = [
    (["--world", "65"], "between 2 and 64 ranks"),
    (["--minutes", "0"], "not a number of minutes above 0"),
    (["--in-flight", "0"], "between 1"),
    (["--seed", "-1"], "between 0"),
    (["--output", "/nowhere/result.json"], "/nowhere is no folder"),
]
CASES = [
    *(("allreduce", *bad) for bad in BAD_EVERYWHERE),
    *(("shaped", *bad) for bad in BAD_EVERYWHERE + BAD_LINKS),
    *(("tcp_limit", *bad) for bad in BAD_EVERYWHERE + BAD_LIMITS),
    *(("soak", *bad) for bad in BAD_SOAKS),
]


@pytest.mark.parametrize(("name", "arguments", "message"), CASES)
def test_a_bad_option_is_named(
    program: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as info:
        program(name).main()
    assert info.value.code == 2
    error = capsys.readouterr().err
    assert message in error and arguments[-2] in error


def test_shaped_says_what_it_needs(
    program: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shaped"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit):
        program("shaped").main()
    assert "root" in capsys.readouterr().err
