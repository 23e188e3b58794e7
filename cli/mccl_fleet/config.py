"""What the command itself can be told: which fleet to use. A profile is a YAML file with these keys.

The first that exists is read: `--profile FILE`, the file that MCCL_FLEET_PROFILE names, and
`~/.config/mccl-fleet/profile.yaml`. Over the profile stand MCCL_FLEET_ADDRESS and MCCL_FLEET_LOCAL_MACS,
over those the options.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from mccl_core.settings import Resolved, resolve
from mccl_ray.jobfile import YamlFile, read_yaml

PREFIX = "MCCL_FLEET_"
DEFAULT_PROFILE = Path("~/.config/mccl-fleet/profile.yaml")


class ClientConfig(BaseModel):
    """Where jobs run."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    address: str | None = None
    """The head's job server, as in `head.example:8265`. Unset: a fleet on this machine, for one job."""
    local_macs: int = Field(default=2, ge=1, le=64)
    """Macs of a fleet on this machine."""


def load(
    *, environ: Mapping[str, str], profile: Path | None = None, arguments: Mapping[str, Any] | None = None
) -> Resolved[ClientConfig]:
    """The configuration with the source of each value.

    Raises:
        SettingsError: a key or value is wrong, or a profile that was named cannot be read.
    """
    file = _profile(environ, profile)
    return resolve(
        ClientConfig,
        file=file.values,
        environ={name: value for name, value in environ.items() if value},
        arguments=arguments,
        prefix=PREFIX,
        file_name=file.name,
        file_lines=file.lines,
    )


def _profile(environ: Mapping[str, str], profile: Path | None) -> YamlFile:
    if profile is None and environ.get(f"{PREFIX}PROFILE"):
        profile = Path(environ[f"{PREFIX}PROFILE"])
    if profile is not None:
        return read_yaml(profile.expanduser())
    default = DEFAULT_PROFILE.expanduser()
    return read_yaml(default) if default.is_file() else YamlFile("profile", {}, {})
