"""The digits script, what it logs, and its run under plain DDP over Gloo, to which others are compared."""

from __future__ import annotations

import csv
from pathlib import Path

DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "train.py"
ARGUMENTS = ("--epochs", "4", "--seed", "7", "--batch-size", "32")
STEPS = 4 * 23  # 1,437 digits in batches of 32 on each of two ranks
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
# Stock Lightning needs to be told of torchrun's two processes; the digits script names no devices.
UNDER_DDP = """
import functools, runpy, sys
import lightning.pytorch as pl
pl.Trainer = functools.partial(pl.Trainer, strategy="ddp", accelerator="cpu", devices=2)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def logged(directory: Path, column: str) -> list[float]:
    """A column of what CSVLogger wrote on rank 0, below `directory`."""
    (path,) = directory.rglob("digits/version_0/metrics.csv")
    with path.open() as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]]
