"""Going on within an epoch: every sample is seen, whatever the number of workers is now."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mccl_lightning.contract import Checkpoint, Finished
from mccl_lightning.position import batches_done

pytestmark = pytest.mark.timeout(220)

SCRIPT = """
import sys
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        ids = batch[0]
        print(f"SEEN {self.current_epoch} {self.global_step} {ids.tolist()}", flush=True)
        return self.layer(ids[:, None].float()).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-4)

pl.seed_everything(5)
data = DataLoader(TensorDataset(torch.arange(24)), batch_size=2, shuffle=True, num_workers=int(sys.argv[1]))
trainer = pl.Trainer(max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Model(), data)
"""


def seen(ranks: list, epoch: int, below_step: int = 1000) -> list[int]:
    """The samples that all ranks trained on in an epoch."""
    lines = re.findall(r"SEEN (\d+) (\d+) \[([\d, ]+)\]", "".join(rank.output for rank in ranks))
    return [
        int(sample)
        for line_epoch, step, samples in lines
        if int(line_epoch) == epoch and int(step) < below_step
        for sample in samples.split(",")
    ]


@pytest.mark.parametrize(
    ("batches", "of_ranks", "on_ranks", "multiple_of", "expected"),
    [(5, 3, 3, 1, 5), (3, 2, 3, 1, 2), (2, 3, 2, 1, 3), (5, 4, 3, 1, 6), (5, 4, 3, 4, 4), (1, 1, 3, 1, 0)],
)
def test_done_batches_are_rounded_down(
    batches: int, of_ranks: int, on_ranks: int, multiple_of: int, expected: int
) -> None:
    assert batches_done(batches, of_ranks=of_ranks, on_ranks=on_ranks, multiple_of=multiple_of) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("then", "loaders"), [(3, 0), (2, 1), (1, 1)])
def test_each_sample_is_seen_once_across_a_resize(
    script: Callable, run_fleet: Callable, tmp_path: Path, then: int, loaders: int
) -> None:
    path = script(SCRIPT)
    saved_at = 9  # the third of six steps in epoch 1, on two ranks
    before = run_fleet(
        path, loaders, world_size=2, staging_dir=str(tmp_path / "staging"), checkpoint_every_n_steps=saved_at
    )
    assert before[0].returncode == 0, before[0].output
    (checkpoint,) = [event for event in before[0].of(Checkpoint) if event.step == saved_at]
    after = run_fleet(path, loaders, world_size=then, resume_from=f"{checkpoint.path}/checkpoint.ckpt")
    assert after[0].returncode == 0, after[0].output

    assert not seen(after, epoch=0)
    assert sorted(seen(before, epoch=1, below_step=saved_at) + seen(after, epoch=1)) == list(range(24))
    assert after[0].of(Finished)[0].step == saved_at + 6 // then


@pytest.mark.slow
def test_a_fit_resumed_between_epochs_shuffles_as_it_would_have(
    script: Callable, run_fleet: Callable, tmp_path: Path
) -> None:
    path = script(SCRIPT)
    whole = run_fleet(path, 1, world_size=1, staging_dir=str(tmp_path / "staging"))
    checkpoint = whole[0].of(Checkpoint)[0].path
    resumed = run_fleet(path, 1, world_size=1, resume_from=f"{checkpoint}/checkpoint.ckpt")
    assert seen(resumed, epoch=1) == seen(whole, epoch=1) != seen(whole, epoch=0)
