"""A fit of an unmodified script inside fleet workers: its events, its checkpoints, and going on from one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mccl_lightning.contract import Checkpoint, Error, Finished, Started, Step, Validation

pytestmark = pytest.mark.timeout(220)

SCRIPT = """
import os
import sys
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if "--fail" in sys.argv and self.global_step == 2:
            raise RuntimeError("no more")
        if "--die" in sys.argv and self.global_step == 2 and self.global_rank == 1:
            os._exit(9)
        if "--break-a-group" in sys.argv and self.global_step == 2:
            self.group = torch.distributed.new_group()  # kept: a group that is destroyed is nobody's concern any more
            try:
                torch.distributed.all_reduce(torch.ones(1 + self.global_rank), group=self.group)
            except torch.distributed.DistBackendError as error:
                print("swallowed", error)
        return self.layer(batch[0]).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

pl.seed_everything(3)
data = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4, shuffle=True)
trainer = pl.Trainer(
    max_epochs=3, strategy="ddp", devices=4, accelerator="gpu", logger=False, enable_progress_bar=False
)
model = Model()
trainer.fit(model, data, data)
if trainer.is_global_zero:
    print("WEIGHTS", model.layer.weight.tolist(), trainer.global_step)
"""


def weights(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith("WEIGHTS"))


def test_a_fit_reports_its_course_and_hands_over_checkpoints(
    script: Callable, run_fleet: Callable, tmp_path: Path
) -> None:
    staging = tmp_path / "staging"
    ranks = run_fleet(script(SCRIPT), world_size=2, staging_dir=str(staging), progress_interval_s=3600)
    for number, rank in enumerate(ranks):
        assert rank.returncode == 0, rank.output
        (started,) = rank.of(Started)
        assert (started.rank, started.world_size, started.total_steps) == (number, 2, 12)
        assert (started.strategy, started.device, started.backend) == ("mccl_ddp", "cpu", "mccl")
        assert [event.step for event in rank.of(Step)] == [4, 8, 12]
        assert all(event.batch_size == 4 and event.samples_per_s > 0 for event in rank.of(Step))
        assert [event.step for event in rank.of(Validation)] == [4, 8, 12]
        assert rank.of(Validation)[0].metrics.keys() == {"val_loss"}
        saved = rank.of(Checkpoint)
        assert [(event.step, event.epoch, event.reason) for event in saved] == [
            (4, 0, "periodic"),
            (8, 1, "periodic"),
            (12, 2, "periodic"),
        ]
        assert all((event.path is None) == (number > 0) for event in saved)
        (finished,) = rank.of(Finished)
        assert rank.events[-1] == finished
        assert (finished.step, finished.samples) == (12, 48)
        assert finished.all_reduces >= 12
        assert finished.bytes_all_reduced >= 12 * 5 * 4
    assert ranks[0].of(Validation) == ranks[1].of(Validation)
    assert {path.name for path in staging.rglob("*") if path.is_file()} == {"checkpoint.ckpt"}
    assert len(list(staging.iterdir())) == 3
    assert "strategy='ddp', accelerator='gpu', devices=4, num_nodes=1 became" in ranks[0].output
    assert "became" not in ranks[1].output


@pytest.mark.slow
def test_a_resumed_fit_ends_as_an_uninterrupted_one(script: Callable, run_fleet: Callable, tmp_path: Path) -> None:
    path = script(SCRIPT)
    whole = run_fleet(path, world_size=2, staging_dir=str(tmp_path / "staging"))
    checkpoint = Path(whole[0].of(Checkpoint)[0].path) / "checkpoint.ckpt"
    resumed = run_fleet(path, world_size=2, resume_from=str(checkpoint))
    assert resumed[0].returncode == 0, resumed[0].output
    assert f"resuming from {checkpoint}" in resumed[0].output
    assert weights(resumed[0].output) == weights(whole[0].output)
    assert resumed[0].of(Finished)[0].samples == 32


@pytest.mark.slow
def test_a_failing_fit_says_so_and_saves_nothing(script: Callable, run_fleet: Callable, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    ranks = run_fleet(script(SCRIPT), "--fail", world_size=2, staging_dir=str(staging))
    for rank in ranks:
        assert rank.returncode == 1
        assert rank.events[-1] == Error(message="RuntimeError: no more")
        assert not rank.of(Checkpoint)
    assert not staging.exists()


@pytest.mark.slow
def test_a_group_in_error_saves_nothing(script: Callable, run_fleet: Callable, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    ranks = run_fleet(script(SCRIPT), "--break-a-group", world_size=2, staging_dir=str(staging))
    for rank in ranks:
        assert "swallowed mccl" in rank.output, rank.output
        assert rank.returncode != 0 and "mismatch" in rank.of(Error)[0].message
        assert not rank.of(Checkpoint)
    assert not [path for path in staging.rglob("*") if path.is_file()]


def test_a_peers_death_ends_the_others_and_saves_nothing(script: Callable, run_fleet: Callable, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    survivor, dead = run_fleet(script(SCRIPT), "--die", world_size=2, staging_dir=str(staging))
    assert (survivor.returncode, dead.returncode) == (1, 9)
    (error,) = survivor.of(Error)
    assert "DistBackendError" in error.message
    assert "rank 1" in error.message
    assert not survivor.of(Checkpoint)
    assert not staging.exists()


@pytest.mark.slow
def test_a_drain_on_one_host_makes_all_ranks_save_at_one_step(
    script: Callable, run_fleet: Callable, tmp_path: Path
) -> None:
    drain = tmp_path / "drain"
    drain.touch()
    ranks = run_fleet(
        script(SCRIPT),
        world_size=2,
        staging_dir=str(tmp_path / "staging"),
        drain_file=str(drain),
        checkpoint_every_n_epochs=0,
    )
    for rank in ranks:
        assert rank.returncode == 0, rank.output
        assert [(event.step, event.reason) for event in rank.of(Checkpoint)] == [(2, "drain"), (12, "final")]
