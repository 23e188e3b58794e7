"""The job's secret: where it comes from, and what happens when ranks do not share it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, run_ranks_to_the_end

from mccl_core.config import CoreConfig
from mccl_core.settings import SettingsError

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
