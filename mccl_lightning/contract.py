"""What a fleet worker and the script it starts tell each other: variables go in, events come out.

The worker (mccl_ray) starts the user's unmodified script as a child process with the variables of
`FleetEnvironment`. The script's callbacks write events, one JSON line each, to an inherited pipe. Only the
standard library is used here, so that both sides can import this module before torch.

Floats may be NaN or infinite and are then written as Python's json writes them (`NaN`, `Infinity`).
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

FLEET = "MCCL_FLEET"
EVENTS_FD = "MCCL_FLEET_EVENTS_FD"
STAGING_DIR = "MCCL_FLEET_STAGING_DIR"
RESUME_FROM = "MCCL_FLEET_RESUME_FROM"
DRAIN_FILE = "MCCL_FLEET_DRAIN_FILE"
CHECKPOINT_EVERY_N_EPOCHS = "MCCL_FLEET_CHECKPOINT_EVERY_N_EPOCHS"
CHECKPOINT_EVERY_N_STEPS = "MCCL_FLEET_CHECKPOINT_EVERY_N_STEPS"
PROGRESS_INTERVAL_S = "MCCL_FLEET_PROGRESS_INTERVAL_S"

CHECKPOINT_FILE = "checkpoint.ckpt"
"""The file's name inside the directory that a checkpoint event names."""

MAX_EVENT_NBYTES = 4095
"""An encoded event with its newline is never longer (a pipe's atomic write on Linux)."""


def in_fleet(environ: Mapping[str, str]) -> bool:
    """True where a fleet worker started this process."""
    return environ.get(FLEET) == "1"


@dataclass(frozen=True, kw_only=True)
class FleetEnvironment:
    """The variables that a worker gives the script's process.

    Every optional field may be left out: a missing number takes its default from `mccl_lightning.config`.
    """

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    node_rank: int = 0
    events_fd: int | None = None
    """Inherited write end of a pipe for events. None: no events."""
    staging_dir: str | None = None
    """A directory on this host where rank 0 puts checkpoints for the worker. None: no checkpoints."""
    resume_from: str | None = None
    """Path of the checkpoint from which `Trainer.fit` continues. It must be readable on every rank."""
    drain_file: str | None = None
    """Once this file exists on any rank's host, all ranks checkpoint at a common step boundary, once."""
    checkpoint_every_n_epochs: int | None = None
    checkpoint_every_n_steps: int | None = None
    progress_interval_s: float | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"RANK={self.rank} is outside 0..WORLD_SIZE-1, where WORLD_SIZE={self.world_size}")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "FleetEnvironment":
        """Reads the variables.

        Raises:
            ValueError: a required variable is missing or one holds no number; the text names it.
        """
        return cls(
            rank=_integer(environ, "RANK"),
            world_size=_integer(environ, "WORLD_SIZE"),
            master_addr=_required(environ, "MASTER_ADDR"),
            master_port=_integer(environ, "MASTER_PORT"),
            node_rank=_integer(environ, "NODE_RANK") if environ.get("NODE_RANK") else 0,
            events_fd=_optional_integer(environ, EVENTS_FD),
            staging_dir=environ.get(STAGING_DIR) or None,
            resume_from=environ.get(RESUME_FROM) or None,
            drain_file=environ.get(DRAIN_FILE) or None,
            checkpoint_every_n_epochs=_optional_integer(environ, CHECKPOINT_EVERY_N_EPOCHS),
            checkpoint_every_n_steps=_optional_integer(environ, CHECKPOINT_EVERY_N_STEPS),
            progress_interval_s=_optional_float(environ, PROGRESS_INTERVAL_S),
        )

    def to_environ(self) -> dict[str, str]:
        """The variables to add to the script's environment, launcher's variables included.

        A worker runs one process on its host, so the local rank is always 0 of 1.
        """
        values = {
            FLEET: "1",
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "NODE_RANK": self.node_rank,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
            EVENTS_FD: self.events_fd,
            STAGING_DIR: self.staging_dir,
            RESUME_FROM: self.resume_from,
            DRAIN_FILE: self.drain_file,
            CHECKPOINT_EVERY_N_EPOCHS: self.checkpoint_every_n_epochs,
            CHECKPOINT_EVERY_N_STEPS: self.checkpoint_every_n_steps,
            PROGRESS_INTERVAL_S: self.progress_interval_s,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Started:
    """`Trainer.fit` is about to take its first step on this rank."""

    event: ClassVar[str] = "started"
    rank: int
    world_size: int
    host: str
    pid: int
    strategy: str
    device: str
    backend: str | None
    """Name of the process group's backend, None where there is no group."""
    max_epochs: int | None
    max_steps: int
    """Optimizer steps, -1 for no limit (as in Lightning)."""
    total_steps: int | None
    """Optimizer steps that this fit will end at, None where that is unknown."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Progress; thinned out by time."""

    event: ClassVar[str] = "step"
    step: int
    """Optimizer steps completed."""
    epoch: int
    batch_size: int | None
    """Samples of this rank's batch, None where it could not be told from the batch."""
    samples_per_s: float | None
    """This rank's rate since its last step event, validation excluded."""
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class Validation:
    """A validation run inside fit has ended."""

    event: ClassVar[str] = "validation"
    step: int
    epoch: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint is complete. Every rank says so, since reporting one to Ray Train is collective."""

    event: ClassVar[str] = "checkpoint"
    path: str | None
    """On rank 0 a directory inside the staging directory that holds `CHECKPOINT_FILE`; the reader owns it and
    deletes it. None on other ranks."""
    step: int
    epoch: int
    metrics: Mapping[str, float]
    reason: str = "periodic"
    """`periodic`; `drain` where a drain file asked for it; `final` where training ended between periods."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """`Trainer.fit` has returned without an error."""

    event: ClassVar[str] = "finished"
    step: int
    epoch: int
    metrics: Mapping[str, float]
    samples: int | None
    """Samples that this rank trained on in this fit."""
    samples_per_s: float | None
    """This rank's rate over the whole fit, validation excluded."""
    bytes_all_reduced: int | None
    """None where the process group's backend is not mccl."""
    all_reduces: int | None


@dataclass(frozen=True, kw_only=True)
class Error:
    """`Trainer.fit` is ending with an exception on this rank."""

    event: ClassVar[str] = "error"
    message: str


Event = Started | Step | Validation | Checkpoint | Finished | Error
_KINDS: dict[str, type[Event]] = {kind.event: kind for kind in (Started, Step, Validation, Checkpoint, Finished, Error)}


def encode(event: Event) -> bytes:
    """One JSON line, newline included, of at most `MAX_EVENT_NBYTES`.

    An error's text is cut to fit, and metrics that do not fit are left out, the last ones first.

    Raises:
        ValueError: the event does not fit even so (a path of thousands of bytes).
    """
    fields: dict[str, Any] = {"event": event.event, **dataclasses.asdict(event)}
    line = _line(fields)
    while len(line) > MAX_EVENT_NBYTES:
        excess = len(line) - MAX_EVENT_NBYTES
        if isinstance(event, Error) and fields["message"]:
            # A character takes up to 12 bytes of JSON: a few rounds perhaps, but never too much is cut.
            fields["message"] = fields["message"][: -max(1, excess // 12)]
        elif fields.get("metrics"):
            fields["metrics"].popitem()
        else:
            raise ValueError(f"a {event.event} event of {len(line)} bytes exceeds {MAX_EVENT_NBYTES}")
        line = _line(fields)
    return line


def decode(line: bytes | str) -> Event:
    """The event that `encode` wrote.

    Raises:
        ValueError: not JSON, an unknown kind of event, or fields missing or unknown; the text says which.
    """
    fields = json.loads(line)
    if not isinstance(fields, dict) or fields.get("event") not in _KINDS:
        raise ValueError(f"not an event (known: {', '.join(_KINDS)}): {line!r}")
    kind = _KINDS[fields.pop("event")]
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"a malformed {kind.event} event: {error}") from error


def _line(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        raise ValueError(f"{FLEET}=1, but {name} is not set: a fleet worker sets it for the script that it starts")
    return value


def _integer(environ: Mapping[str, str], name: str) -> int:
    value = _required(environ, name)
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None


def _optional_integer(environ: Mapping[str, str], name: str) -> int | None:
    return _integer(environ, name) if environ.get(name) else None


def _optional_float(environ: Mapping[str, str], name: str) -> float | None:
    value = environ.get(name)
    if not value:
        return None
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {value!r}") from None
