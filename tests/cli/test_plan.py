"""`plan`: what a job would use, without a fleet."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mccl_fleet.main import app
from mccl_fleet.sizes import nbytes_name, parse_nbytes
from mccl_ray import exitcodes

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs `plan` in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MCCL_LINK_PROFILE", raising=False)
    return lambda *arguments: CliRunner().invoke(app, ["plan", *map(str, arguments)])


def values_of(result: Any) -> list[dict[str, Any]]:
    assert result.exit_code == exitcodes.OK, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_each_size_has_its_algorithm_and_the_others_their_time(run) -> None:
    small, large = values_of(run("--workers", 4, "--size", "4KiB", "--size", "25MB", "--json"))
    assert (small["nbytes"], large["nbytes"]) == (4096, 25_000_000)
    assert small["chosen"]["algorithm"] == "recursive_doubling"
    assert large["chosen"]["algorithm"] == "ring"
    times = [candidate["predicted_ms"] for candidate in large["candidates"]]
    assert large["chosen"]["predicted_ms"] == min(times)
    text = run("--workers", 4, "--size", "4KiB").stdout
    assert "4 KiB  recursive_doubling" in text
    assert "ring" in text


def test_a_step_is_simulated(run) -> None:
    *_, last = values_of(
        run("--workers", 8, "--size", "1MB", "--bucket-mb", 2, "--backward-ms", 40, "--buckets", 4, "--json")
    )
    assert (last["buckets"], last["bucket_nbytes"]) == (4, 2_000_000)
    step = last["step"]
    assert 40 < step["step_ms"] < 60
    assert step["exposed_ms"] == pytest.approx(step["step_ms"] - 40)
    assert 0 < step["goodput_share"] <= 1
    assert (
        "4 buckets of 2 MB in 40 ms"
        in run("--workers", 8, "--bucket-mb", 2, "--backward-ms", 40, "--buckets", 4).stdout
    )


def test_a_profile_and_switches_change_the_plan(run) -> None:
    Path("link.yaml").write_text("latency_us: 1\nstep_us: 1\ngoodput_GBps: 1\n")
    [plain] = values_of(run("--workers", 8, "--size", "64KiB", "--json"))
    [tuned] = values_of(run("--workers", 8, "--size", "64KiB", "--link-profile", "link.yaml", "--json"))
    assert tuned["link_profile"]["latency_us"] == 1
    assert tuned["chosen"]["predicted_ms"] < plain["chosen"]["predicted_ms"]
    assert "two_level" not in {candidate["algorithm"] for candidate in plain["candidates"]}
    by_name = values_of(run("--workers", 8, "--size", "64KiB", "--switch-groups", "a,a,a,a,b,b,b,b", "--json"))
    assert "two_level" in {candidate["algorithm"] for candidate in by_name[0]["candidates"]}
    assert values_of(run("--workers", 8, "--size", "64KiB", "--switch-size", 5, "--json")) == by_name


def test_channels_are_shown(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCCL_CHANNELS", "2")
    arguments = ("--workers", 4, "--link-profile", "loopback", "--size", "4KiB", "--size", "64MiB")
    small, large = values_of(run(*arguments, "--json"))
    assert (small["chosen"]["channels"], large["chosen"]["channels"]) == (1, 2)
    assert "ring on 2 channels" in run(*arguments).stdout


def test_the_profile_of_the_environment_is_used(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCCL_LINK_PROFILE", "loopback")
    [line] = values_of(run("--workers", 4, "--size", "1MiB", "--json"))
    assert line["link_profile"]["latency_us"] == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "3q"], "--size: '3q' is no size"),
        (["--size", "0"], "--size: '0' is no size"),
        (["--link-profile", "nothing.yaml"], "--link-profile nothing.yaml: "),
        (["--switch-groups", "a,b"], "--switch-groups: 2 names for 8 workers"),
        (["--switch-groups", "a,,b,b,b,b,b,b"], "--switch-groups: the name of rank 1 is empty"),
        (["--switch-groups", "a,b", "--switch-size", "2"], "--switch-size and --switch-groups"),
        (["--buckets", "2"], "--backward-ms and --buckets"),
        (["--buckets", "2", "--backward-ms", "1", "--collective", "all_gather"], "--backward-ms: "),
    ],
)
def test_an_error_names_the_option(run, arguments: list[str], message: str) -> None:
    result = run("--workers", 8, *arguments)
    assert result.exit_code == exitcodes.BAD_INPUT
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


def test_sizes_are_read_and_named() -> None:
    texts = {"65536": 65536, "64KiB": 65536, "64 kib": 65536, "25MB": 25_000_000, "0.5MiB": 524_288, "7B": 7}
    assert {text: parse_nbytes(text, option="--size") for text in texts} == texts
    names = {65536: "64 KiB", 25_000_000: "25 MB", 1001: "1001 B", 2**30: "1 GiB", 3000: "3 kB"}
    assert {nbytes: nbytes_name(nbytes) for nbytes in names} == names
