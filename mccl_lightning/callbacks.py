"""What Lightning's `callbacks_factory` entry points call: callbacks for a script inside a fleet worker."""

from typing import Any


def lightning_callbacks() -> list[Any]:
    """For `lightning.pytorch`; nothing outside fleet mode."""
    return []


def pytorch_lightning_callbacks() -> list[Any]:
    """For `pytorch_lightning`; nothing outside fleet mode."""
    return []
