"""The unmodified digits script learns on a fleet exactly what it learns under plain DDP over Gloo."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.digits import ARGUMENTS, DIGITS, STEPS, TORCHRUN, UNDER_DDP, logged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_losses_equal_those_of_plain_ddp(
    script: Callable, run_fleet: Callable, run_alone: Callable, tmp_path: Path
) -> None:
    ranks = run_fleet(DIGITS, *ARGUMENTS, world_size=2)
    assert ranks[0].returncode == 0, ranks[0].output
    plain = run_alone(*TORCHRUN, script(UNDER_DDP), DIGITS, *ARGUMENTS)
    assert plain.returncode == 0, plain.stdout

    ours, theirs = logged(tmp_path / "rank0", "train_loss"), logged(tmp_path / "logs", "train_loss")
    assert len(ours) == STEPS
    assert ours == pytest.approx(theirs, abs=1e-6, rel=0)
    ours, theirs = logged(tmp_path / "rank0", "val_acc"), logged(tmp_path / "logs", "val_acc")
    assert ours == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_digits_are_learned(run_fleet: Callable, tmp_path: Path, world_size: int) -> None:
    ranks = run_fleet(DIGITS, world_size=world_size)
    assert ranks[0].returncode == 0, ranks[0].output
    assert logged(tmp_path / "rank0", "val_acc")[-1] >= 0.95
