"""Continues an unmodified script from the checkpoint that the fleet worker names."""

import functools
import importlib
import inspect
from typing import Any

from mccl_lightning import environment


def wrap(module: Any) -> None:
    """Gives `Trainer.fit` the worker's checkpoint where the user passed none.

    A script that calls `fit` several times resumes in the first call only.
    """
    module.Trainer.fit = _resuming(module.Trainer.fit)


def _resuming(original: Any) -> Any:
    signature = inspect.signature(original)
    pending = True

    @functools.wraps(original)
    def fit(*args: Any, **kwargs: Any) -> Any:
        nonlocal pending
        fleet = environment.fleet()
        if fleet is None or fleet.resume_from is None or not pending:
            return original(*args, **kwargs)
        pending = False
        arguments = signature.bind(*args, **kwargs).arguments
        if arguments.get("ckpt_path") is not None:
            return original(*args, **kwargs)
        arguments["ckpt_path"] = fleet.resume_from
        if "weights_only" in signature.parameters and arguments.get("weights_only") is None:
            # Written by this job, so as trusted as the script; hyperparameters may be of any class.
            arguments["weights_only"] = False
        _rank_zero_info(original.__module__, f"mccl-fleet: resuming from {fleet.resume_from}")
        return original(**arguments)

    return fit


def _rank_zero_info(trainer_module: str, text: str) -> None:
    root = trainer_module.removesuffix(".trainer.trainer")
    importlib.import_module(f"{root}.utilities.rank_zero").rank_zero_info(text)
