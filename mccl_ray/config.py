"""What a job says about itself. Each default stands here and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from mccl_core.config import CoreConfig
from mccl_core.settings import EnvironmentPrefix
from mccl_lightning.config import LightningConfig

_SECRET_VARIABLE = "MCCL_SECRET"
_LIGHTNING = LightningConfig()
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
RUN_DIR = "{run_dir}"
"""Stands in a job's arguments for the folder of its run."""
OF_ONE_HOST = frozenset({"secret", "secret_file", "host_name", "listen_addr", "local_rank"})
"""Fields of the core that belong to a Mac, not to a job."""


class CheckpointSpec(BaseModel):
    """When the workers checkpoint, and how many checkpoints the storage keeps."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    every_n_epochs: int = Field(default=_LIGHTNING.checkpoint_every_n_epochs, ge=0)
    """A checkpoint at the end of every n-th epoch; 0 for none at epochs' ends."""
    every_n_steps: int | None = Field(default=_LIGHTNING.checkpoint_every_n_steps, ge=1)
    """A checkpoint after every n-th optimizer step as well; unset for none within an epoch."""
    keep: int = Field(default=2, ge=1)
    """Older checkpoints of the run are deleted."""


class JobSpec(BaseModel):
    """A training job: an unmodified script, and how many Macs run it.

    `script` and `workdir` are relative to the job file's folder, `storage` to the folder of the command.

    Raises:
        pydantic.ValidationError: names the field, the value and the range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, coerce_numbers_to_str=True)

    name: str = Field(default="job", pattern=NAME_PATTERN)
    """Names the run's folder and its job: letters, digits, ".", "_" and "-"; unset, the job file's own name."""
    script: Path
    """The program that every worker runs, with Python."""
    args: tuple[str, ...] = ()
    """The script's arguments; `{run_dir}` in them becomes the run's folder. In a variable `[--epochs, 3]`."""
    workdir: Path | None = None
    """The folder the script runs in, and what a remote fleet is sent; unset for the script's own folder."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Macs to train on, one worker each."""
    pool: str = Field(default="mac", pattern=r"^[a-z0-9][a-z0-9-]*$")
    """A worker takes one unit of the Ray resource `pool:<pool>`, of which a Mac has one."""
    env: dict[str, str] = {}
    """Variables added to the script's environment. In a variable `{NAME: value}`."""
    storage: Path = Path("runs")
    """Where runs are kept: checkpoints, logs, events, the result. Every Mac must reach it by this path."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """When the workers checkpoint, and how many checkpoints are kept."""
    max_failures: int = Field(default=3, ge=0)
    """Lost or failing workers after which the job gives up; until then it restarts from its checkpoint."""
    progress_interval_s: float = Field(default=_LIGHTNING.progress_interval_s, ge=0.05, le=3600)
    """Seconds between two progress events of a worker."""

    core: Annotated[CoreConfig, EnvironmentPrefix("MCCL_")] = CoreConfig.model_validate({})
    """Options of the process group `mccl`, for every worker."""

    def core_environ(self) -> dict[str, str]:
        """The variables that carry the options of the core that are set into the script's process."""
        names = sorted(self.core.model_fields_set)
        return {f"MCCL_{name.upper()}": str(getattr(self.core, name)) for name in names}

    @field_validator("core")
    @classmethod
    def _core_fields_of_a_job(cls, core: CoreConfig) -> CoreConfig:
        for name in sorted(core.model_fields_set & OF_ONE_HOST):
            raise ValueError(f"must not hold {name}, which belongs to one Mac: set MCCL_{name.upper()} there")
        return core

    @field_validator("env")
    @classmethod
    def _no_secret_in_the_open(cls, env: dict[str, str]) -> dict[str, str]:
        if _SECRET_VARIABLE in env:
            raise ValueError(
                f"must not hold {_SECRET_VARIABLE}: a job's description is not secret. Write it to a file of "
                f"mode 0600 on each Mac and name that in {_SECRET_VARIABLE}_FILE"
            )
        for name in env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"holds {name!r}, which cannot be a variable's name")
        return env

    @field_validator("storage")
    @classmethod
    def _storage_is_a_folder(cls, storage: Path) -> Path:
        if ":/" in str(storage):
            raise ValueError("must be a folder that every Mac mounts, not an address")
        return storage
