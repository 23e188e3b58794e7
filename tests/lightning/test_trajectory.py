"""The unmodified digits script learns on a fleet exactly what it learns under plain DDP over Gloo."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DIGITS = Path(__file__).parents[2] / "examples/digits/train.py"
ARGUMENTS = ("--epochs", "4", "--seed", "7", "--batch-size", "32")
# Stock Lightning needs to be told of torchrun's two processes; the digits script names no devices.
UNDER_DDP = """
import functools, runpy, sys
import lightning.pytorch as pl
pl.Trainer = functools.partial(pl.Trainer, strategy="ddp", accelerator="cpu", devices=2)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def logged(directory: Path, column: str) -> list[float]:
    """A column of what CSVLogger wrote on rank 0."""
    (path,) = directory.glob("logs/digits/version_0/metrics.csv")
    with path.open() as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]]


def test_losses_equal_those_of_plain_ddp(
    script: Callable, run_fleet: Callable, run_alone: Callable, tmp_path: Path
) -> None:
    ranks = run_fleet(DIGITS, *ARGUMENTS, world_size=2)
    assert ranks[0].returncode == 0, ranks[0].output
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    plain = run_alone(*torchrun, script(UNDER_DDP), DIGITS, *ARGUMENTS)
    assert plain.returncode == 0, plain.stdout

    ours, theirs = logged(tmp_path / "rank0", "train_loss"), logged(tmp_path, "train_loss")
    assert len(ours) == 4 * 23  # 1,437 digits in batches of 32 on each of two ranks
    assert ours == pytest.approx(theirs, abs=1e-6, rel=0)
    assert logged(tmp_path / "rank0", "val_acc") == pytest.approx(logged(tmp_path, "val_acc"), abs=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_digits_are_learned(run_fleet: Callable, tmp_path: Path, world_size: int) -> None:
    ranks = run_fleet(DIGITS, world_size=world_size)
    assert ranks[0].returncode == 0, ranks[0].output
    assert logged(tmp_path / "rank0", "val_acc")[-1] >= 0.95
