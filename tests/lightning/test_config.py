"""What this layer lets a job configure."""

from typing import Any

import pytest
from pydantic import ValidationError

from mccl_lightning.config import LightningConfig
from mccl_lightning.contract import FleetEnvironment


def test_variables_override_defaults_one_by_one() -> None:
    fleet = FleetEnvironment(
        rank=0,
        world_size=1,
        master_addr="h",
        master_port=1,
        checkpoint_every_n_epochs=0,
        progress_interval_s=0.5,
    )
    config = LightningConfig.from_fleet(fleet)
    assert config == LightningConfig(checkpoint_every_n_epochs=0, progress_interval_s=0.5)
    assert config.checkpoint_every_n_steps is LightningConfig().checkpoint_every_n_steps is None


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"checkpoint_every_n_epochs": -1}, r"checkpoint_every_n_epochs\n.*greater than or equal to 0.*-1"),
        (
            {"checkpoint_every_n_steps": 0},
            r"checkpoint_every_n_steps\n.*greater than or equal to 1.*input_value=0",
        ),
        ({"progress_interval_s": 1e9}, r"progress_interval_s\n.*less than or equal to 3600"),
        ({"checkpoint_every": 3}, r"checkpoint_every\n.*not permitted"),
    ],
)
def test_errors_name_field_value_and_range(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        LightningConfig(**values)


def test_every_field_says_what_it_is() -> None:
    assert all(field.description for field in LightningConfig.model_fields.values())
