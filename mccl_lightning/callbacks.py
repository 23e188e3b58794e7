"""What Lightning's `callbacks_factory` entry points call: callbacks for a script inside a fleet worker."""

import importlib
from pathlib import Path
from typing import Any

from mccl_lightning import environment
from mccl_lightning.contract import FleetEnvironment


def lightning_callbacks() -> list[Any]:
    """For `lightning.pytorch`; nothing outside fleet mode."""
    fleet = environment.fleet()
    return [] if fleet is None else _fleet_callbacks("lightning.pytorch", fleet)


def pytorch_lightning_callbacks() -> list[Any]:
    """For `pytorch_lightning`; nothing outside fleet mode."""
    fleet = environment.fleet()
    return [] if fleet is None else _fleet_callbacks("pytorch_lightning", fleet)


def _fleet_callbacks(root: str, fleet: FleetEnvironment) -> list[Any]:
    # pydantic and torch are loaded here, in a fleet worker's script only.
    from mccl_lightning.config import LightningConfig
    from mccl_lightning.drain import DrainWatch
    from mccl_lightning.events import EventWriter
    from mccl_lightning.handover import Handover
    from mccl_lightning.position import EpochPosition
    from mccl_lightning.reporter import Reporter

    lightning = importlib.import_module(f"{root}.callbacks")
    config = LightningConfig.from_fleet(fleet)
    writer = EventWriter(fleet.events_fd)
    reporter = type("FleetReporter", (Reporter, lightning.Callback), {})
    position = type("FleetPosition", (EpochPosition, lightning.Callback), {})
    callbacks = [position(), reporter(writer, progress_interval_s=config.progress_interval_s)]
    if fleet.staging_dir is not None:
        handover = type("FleetCheckpoint", (Handover, lightning.Checkpoint), {})
        callbacks.append(
            handover(
                writer,
                staging_dir=Path(fleet.staging_dir),
                drain=DrainWatch(fleet.drain_file),
                every_n_epochs=config.checkpoint_every_n_epochs,
                every_n_steps=config.checkpoint_every_n_steps,
            )
        )
    return callbacks
