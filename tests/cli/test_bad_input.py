"""Bad input: one clear message, the documented status, nothing started."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mccl_ray import exitcodes

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def run(run_here: Callable[..., Any]) -> Callable[..., Any]:
    """Runs the command in this process."""
    return run_here


def assert_one_error(result, status: int, *parts: str) -> None:
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr


def test_an_unknown_key_names_line_and_likely_key(run, write_job: Callable[..., str]) -> None:
    Path("job.yaml").write_text("script: s.py\n\nmax_failure: 2\n")
    Path("s.py").touch()
    result = run("submit", "job.yaml")
    assert_one_error(result, exitcodes.BAD_INPUT, "job.yaml:3", "did you mean 'max_failures'?")


def test_a_missing_script_names_path_and_line(run) -> None:
    Path("job.yaml").write_text("workers: 1\nscript: s.py\n")
    assert_one_error(run("submit", "job.yaml"), exitcodes.BAD_INPUT, "s.py", "job.yaml:2")


def test_a_missing_job_file_is_named(run) -> None:
    assert_one_error(run("submit", "no.yaml"), exitcodes.BAD_INPUT, "no.yaml: cannot be read")


def test_more_workers_than_macs_says_how_many_there_are(run, write_job: Callable[..., str]) -> None:
    result = run("submit", write_job("", workers=3), "--local-macs", 2)
    assert_one_error(result, exitcodes.NOT_ENOUGH_MACS, "3 workers", "2 Macs", "--local-macs 3")


def test_a_pool_that_a_local_fleet_lacks_is_refused(run, write_job: Callable[..., str]) -> None:
    result = run("submit", write_job("", pool="studio"))
    assert_one_error(result, exitcodes.NOT_ENOUGH_MACS, "the pool 'studio' has 0 Macs", "the pool 'mac' only")


@pytest.mark.parametrize("address", [":", "foo:bar", "1.2.3.4:99999"])
def test_an_address_that_is_none_is_bad_input(run, address: str) -> None:
    assert_one_error(run("status", "--address", address), exitcodes.BAD_INPUT, repr(address), "is not host:port")


@pytest.mark.parametrize("command", [["status"], ["nodes"], ["cancel", "x"], ["logs", "x"]])
def test_an_unreachable_head_fails_at_once(run, command: list[str]) -> None:
    result = run(*command, "--address", "127.0.0.1:9")
    assert_one_error(result, exitcodes.NO_HEAD, "no head at http://127.0.0.1:9", "MCCL_FLEET_ADDRESS")


def test_submit_to_an_unreachable_head_fails_at_once(run, write_job: Callable[..., str]) -> None:
    result = run("submit", write_job(""), "--address", "127.0.0.1:9")
    assert_one_error(result, exitcodes.NO_HEAD, "no head at http://127.0.0.1:9")


def test_commands_about_jobs_need_a_head(run) -> None:
    assert_one_error(run("status"), exitcodes.NO_HEAD, "no head is configured", "--address")


def test_a_missing_secret_file_is_named(run, write_job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCCL_SECRET_FILE", "/nowhere/secret")
    assert_one_error(run("submit", write_job("")), exitcodes.BAD_INPUT, "/nowhere/secret", "MCCL_SECRET_FILE")


def test_a_secret_file_that_others_can_read_is_refused(
    run, write_job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("s" * 32)
    (tmp_path / "secret").chmod(0o644)
    monkeypatch.setenv("MCCL_SECRET_FILE", str(tmp_path / "secret"))
    result = run("submit", write_job(""))
    assert_one_error(result, exitcodes.BAD_INPUT, "chmod 600")
    assert "s" * 32 not in result.stderr


def test_a_wrong_profile_names_its_line(run, write_job: Callable[..., str]) -> None:
    Path("profile.yaml").write_text("local_macs: 2\nadress: head\n")
    result = run("submit", write_job(""), "--profile", "profile.yaml")
    assert_one_error(result, exitcodes.BAD_INPUT, "profile.yaml:2", "did you mean 'address'?")


def test_config_show_tells_where_each_value_comes_from(
    run, write_job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCCL_FLEET_LOCAL_MACS", "3")
    monkeypatch.setenv("MCCL_SECRET", "not-for-your-eyes")
    (tmp_path / "script.py").touch()
    (tmp_path / "job.yaml").write_text("script: script.py\nworkers: 2\n")
    result = run("config", "show", "job.yaml", "--json")
    assert result.exit_code == exitcodes.OK, result.output
    rows = {row["field"]: row for row in map(json.loads, result.stdout.splitlines())}
    assert rows["local_macs"]["value"] == 3
    assert rows["local_macs"]["source"] == "environment MCCL_FLEET_LOCAL_MACS"
    assert rows["workers"]["source"] == "file job.yaml:2"
    assert rows["max_failures"]["source"] == "default"
    assert rows["core.segment_nbytes"]["source"] == "default"
    assert "not-for-your-eyes" not in result.output


def test_the_profile_in_the_home_folder_is_read(run, tmp_path: Path) -> None:
    folder = tmp_path / ".config" / "mccl-fleet"
    folder.mkdir(parents=True)
    (folder / "profile.yaml").write_text("address: 127.0.0.1:9\n")
    assert_one_error(run("nodes"), exitcodes.NO_HEAD, "127.0.0.1:9")


def test_version_prints_what_a_fleet_must_share(run) -> None:
    versions = json.loads(run("version", "--json").stdout)
    assert set(versions) == {"mccl-fleet", "torch", "ray", "lightning"}
