"""What this layer lets a job configure. Each default stands here and nowhere else."""

from pydantic import BaseModel, ConfigDict, Field

from mccl_lightning.contract import FleetEnvironment


class LightningConfig(BaseModel):
    """Checkpoints and progress of a Lightning script on the fleet.

    Raises:
        pydantic.ValidationError: names the field, the value and the range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    checkpoint_every_n_epochs: int = Field(default=1, ge=0)
    """A checkpoint at the end of every n-th epoch; 0 for none at epochs' ends."""
    checkpoint_every_n_steps: int | None = Field(default=None, ge=1)
    """A checkpoint after every n-th optimizer step as well; unset for none within an epoch."""
    progress_interval_s: float = Field(default=1.0, ge=0.05, le=3600)
    """Seconds between two progress events of a rank. Each reads the loss and so waits for the device."""

    @classmethod
    def from_fleet(cls, fleet: FleetEnvironment) -> "LightningConfig":
        """What the worker's variables say; what they leave out keeps its default."""
        values = {name: getattr(fleet, name) for name in cls.model_fields}
        return cls(**{name: value for name, value in values.items() if value is not None})
