"""The job's secret: where it comes from, and what happens when ranks do not share it."""

from __future__ import annotations

import base64
import logging
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, run_ranks_to_the_end

from mccl_core._runtime import current_runtime
from mccl_core.config import CoreConfig
from mccl_core.settings import SettingsError, resolve

SECRET = "a secret of enough characters"


def reduce_once(rank: int, world: int) -> list[bytes]:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor[0].item() == world
    store = dist.distributed_c10d._get_default_store()._underlying_non_prefix_store
    keys = [key for key in store.list_keys() if "mccl" in key]
    assert len(keys) >= 1 + world
    return [store.get(key) for key in keys]


def test_a_given_secret_stays_out_of_the_store() -> None:
    for records in run_ranks(2, reduce_once, MCCL_SECRET=SECRET):
        assert all(SECRET.encode() not in record for record in records)


def test_a_secret_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    run_ranks(2, reduce_once, MCCL_SECRET_FILE=str(path))
    assert CoreConfig.from_environment({"MCCL_SECRET_FILE": str(path)}).read_secret() == SECRET.encode()


def with_secrets(secrets: list[str | None]):
    """A function that sets each rank's own secret and makes a second group with it."""

    def body(rank: int, world: int) -> None:
        secret = secrets[rank]
        if secret is not None:
            os.environ["MCCL_SECRET"] = secret
        dist.new_group(backend="mccl")

    return body


@pytest.mark.parametrize(
    ("secrets", "message"),
    [
        ([SECRET, SECRET, "quite another secret"], "another job secret"),
        ([SECRET, None, SECRET], "has no job secret"),
        ([None, SECRET, None], "was given a job secret"),
    ],
)
def test_ranks_without_the_same_secret_are_told_so(secrets: list[str | None], message: str) -> None:
    outcomes = run_ranks_to_the_end(3, with_secrets(secrets), backend="gloo", timeout_s=60)
    texts = [outcome.text for outcome in outcomes]
    assert any(message in text and "MCCL_SECRET" in text for text in texts), texts
    assert all(SECRET not in text and "quite another" not in text for text in texts)


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o644)
    config = CoreConfig.from_environment({"MCCL_SECRET_FILE": str(path)})
    with pytest.raises(ValueError, match="chmod 600"):
        config.read_secret()


def test_a_missing_file_is_named() -> None:
    config = CoreConfig.from_environment({"MCCL_SECRET_FILE": "/nowhere/secret"})
    with pytest.raises(ValueError, match="/nowhere/secret"):
        config.read_secret()


def test_a_short_secret_is_refused_and_not_shown() -> None:
    with pytest.raises(SettingsError) as info:
        CoreConfig.from_environment({"MCCL_SECRET": "hunter2"})
    assert "16 characters" in str(info.value)
    assert "hunter2" not in str(info.value)


def test_the_secret_is_not_in_the_configs_text() -> None:
    config = CoreConfig.from_environment({"MCCL_SECRET": SECRET})
    assert SECRET not in repr(config) and SECRET not in config.model_dump_json()
    rows = resolve(CoreConfig, environ={"MCCL_SECRET": SECRET}).rows()
    assert all(SECRET not in repr(row) and SECRET not in str(row) for row in rows)


class AllRecords(logging.Handler):
    """Everything that is logged, at every level, with tracebacks."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


def forms(secret: str) -> list[bytes]:
    """How the secret could be written down."""
    raw = secret.encode()
    return [raw, raw.hex().encode(), base64.b64encode(raw).rstrip(b"=")[:-1], repr(raw)[2:-1].encode()]


def everything_said(rank: int, world: int) -> dict[str, list[str]]:
    """What this rank logs, shows and publishes while it makes groups, of which one fails, and meets a stranger."""
    records = AllRecords()
    logging.getLogger().addHandler(records)
    logging.getLogger().setLevel(logging.DEBUG)
    group = dist.new_group(backend="mccl")
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    runtime = current_runtime()
    assert runtime is not None
    with socket.create_connection((runtime.address, runtime.port), timeout=10) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.recv(100)
    errors = []
    for count in (3, 3 + rank):  # the second time they do not agree
        try:
            dist.all_reduce(torch.ones(count), group=group)
        except dist.DistBackendError as error:
            errors += [str(error), repr(error)]
    assert errors
    store = dist.distributed_c10d._get_default_store()._underlying_non_prefix_store
    processes = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    dist.barrier()
    return {
        "log": records.texts,
        "errors": errors,
        "reprs": [repr(runtime), repr(vars(runtime)), repr(vars(runtime._listener)), repr(runtime.config)],
        "store": [f"{key} {store.get(key)!r}" for key in store.list_keys()],
        "processes": [command_line(entry) for entry in processes],
    }


def command_line(process: Path) -> str:
    try:
        return repr((process / "cmdline").read_bytes())
    except OSError:  # it has ended meanwhile
        return ""


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks into /proc, which is Linux's")
@pytest.mark.parametrize("by_file", [False, True], ids=["environment", "file"])
def test_the_secret_is_in_no_log_error_repr_store_or_process_list(tmp_path: Path, by_file: bool) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    given = {"MCCL_SECRET_FILE": str(path)} if by_file else {"MCCL_SECRET": SECRET}
    for said in run_ranks(3, everything_said, backend="gloo", MCCL_LOG_LEVEL="debug", **given):
        assert any("dropped a connection" in text for text in said["log"])  # it does log
        assert any("rank/0" in text for text in said["store"])
        for where, texts in said.items():
            for form in forms(SECRET):
                assert all(form.decode() not in text for text in texts), where
