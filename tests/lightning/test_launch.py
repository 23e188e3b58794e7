"""`strategy="mccl_ddp"` with real processes: alone and under torchrun."""

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.timeout(150)

SCRIPT = """
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

data = DataLoader(TensorDataset(torch.arange(64.0).reshape(16, 4) / 64), batch_size=2)
trainer = pl.Trainer(
    max_epochs=1, strategy="mccl_ddp", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
model = Model()
trainer.fit(model, data)
weights = [torch.zeros_like(model.layer.weight) for _ in range(trainer.world_size)]
dist.all_gather(weights, model.layer.weight.detach())
same = all(torch.equal(other, weights[0]) for other in weights)
rank = f"RANK {trainer.global_rank} of {trainer.world_size}"
print(f"{rank}: {dist.get_backend()} {trainer.global_step} steps {same}\\n")
"""


def test_alone(script: Callable, run_alone: Callable) -> None:
    result = run_alone(script(SCRIPT))
    assert result.returncode == 0, result.stdout
    assert "RANK 0 of 1: mccl 8 steps True" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("group_made_before", [False, True])
def test_under_torchrun_and_in_a_group_that_a_platform_has_made(
    script: Callable, run_alone: Callable, group_made_before: bool
) -> None:
    text = SCRIPT.replace("\nclass Model", '\ndist.init_process_group("mccl")\n\nclass Model')
    path = script(text if group_made_before else SCRIPT)
    result = run_alone("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", path)
    assert result.returncode == 0, result.stdout
    for rank in (0, 1):
        assert f"RANK {rank} of 2: mccl 4 steps True" in result.stdout
