"""The contract between a fleet worker and the script it starts."""

import dataclasses
import subprocess
import sys

import pytest

from mccl_lightning.contract import (
    MAX_EVENT_NBYTES,
    Checkpoint,
    Error,
    Event,
    Finished,
    FleetEnvironment,
    Started,
    Step,
    Validation,
    decode,
    encode,
    in_fleet,
)

FULL = FleetEnvironment(
    rank=1,
    world_size=3,
    master_addr="10.0.0.7",
    master_port=29500,
    node_rank=1,
    events_fd=5,
    staging_dir="/tmp/staging",
    resume_from="/tmp/latest.ckpt",
    drain_file="/tmp/drain",
    checkpoint_every_n_epochs=2,
    checkpoint_every_n_steps=50,
    progress_interval_s=0.5,
)
EVENTS: list[Event] = [
    Started(
        rank=0,
        world_size=2,
        host="mac-7",
        pid=1,
        strategy="mccl_ddp",
        device="mps:0",
        backend="mccl",
        max_epochs=3,
        max_steps=-1,
        total_steps=30,
    ),
    Step(step=1, epoch=0, batch_size=None, samples_per_s=12.5, loss=0.25),
    Validation(step=10, epoch=0, metrics={"val_acc": 0.9}),
    Checkpoint(path=None, step=10, epoch=0, metrics={}, reason="drain"),
    Finished(step=30, epoch=3, metrics={}, samples=960, samples_per_s=1.0, bytes_all_reduced=8, all_reduces=2),
    Error(message="rank 1 died"),
]


def test_environment_survives_the_round_trip() -> None:
    assert FleetEnvironment.from_environ(FULL.to_environ()) == FULL


def test_optional_variables_may_be_missing_or_empty() -> None:
    minimal = FleetEnvironment(rank=0, world_size=1, master_addr="127.0.0.1", master_port=1)
    environ = minimal.to_environ()
    assert all(f"MCCL_FLEET_{name}" not in environ for name in ("EVENTS_FD", "STAGING_DIR", "RESUME_FROM"))
    assert FleetEnvironment.from_environ({**environ, "MCCL_FLEET_STAGING_DIR": ""}) == minimal


def test_launcher_variables_describe_one_process_a_host() -> None:
    environ = FULL.to_environ()
    assert in_fleet(environ)
    assert (environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"], environ["NODE_RANK"]) == ("0", "1", "1")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"RANK": ""}, "RANK is not set"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be an integer, got 'http'"),
        ({"RANK": "3"}, "RANK=3 is outside"),
        ({"MCCL_FLEET_EVENTS_FD": "x"}, "MCCL_FLEET_EVENTS_FD must be an integer"),
        ({"MCCL_FLEET_PROGRESS_INTERVAL_S": "soon"}, "MCCL_FLEET_PROGRESS_INTERVAL_S must be a number"),
    ],
)
def test_errors_name_the_variable(change: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        FleetEnvironment.from_environ({**FULL.to_environ(), **change})


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.event)
def test_events_survive_the_round_trip(event: Event) -> None:
    line = encode(event)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode(line) == event


def test_a_long_error_is_cut_to_fit() -> None:
    event = decode(encode(Error(message="é\n" * 9000)))
    assert isinstance(event, Error)
    assert event.message.startswith("é\n")
    assert MAX_EVENT_NBYTES - 64 <= len(encode(event)) <= MAX_EVENT_NBYTES


def test_metrics_that_do_not_fit_are_left_out() -> None:
    event = Validation(step=1, epoch=0, metrics={f"metric_{i:03d}": i / 7 for i in range(400)})
    line = encode(event)
    decoded = decode(line)
    assert len(line) <= MAX_EVENT_NBYTES
    assert isinstance(decoded, Validation)
    assert dict(list(event.metrics.items())[: len(decoded.metrics)]) == decoded.metrics


def test_what_cannot_fit_raises() -> None:
    with pytest.raises(ValueError, match="exceeds"):
        encode(dataclasses.replace(EVENTS[3], path="/x" * 3000))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "line", [b"[]", b'{"event":"party"}', b'{"event":"error"}', b'{"event":"error","text":"x"}', b"{"]
)
def test_a_malformed_line_raises(line: bytes) -> None:
    with pytest.raises(ValueError):
        decode(line)


def test_importing_it_needs_the_standard_library_only() -> None:
    code = "import sys, mccl_lightning.contract; print({'torch', 'pydantic', 'lightning'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"
