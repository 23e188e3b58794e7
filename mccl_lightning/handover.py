"""The callback that saves checkpoints for the fleet worker to take away."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from mccl_lightning import backend
from mccl_lightning.contract import CHECKPOINT_FILE, Checkpoint
from mccl_lightning.drain import DrainWatch
from mccl_lightning.events import EventWriter
from mccl_lightning.reporter import metrics

Reason = Literal["periodic", "drain", "final"]


class Handover:
    """Saves into the staging directory and says so; mixed in before Lightning's Checkpoint.

    Being a Checkpoint it runs after all other callbacks and the module's own hooks. It saves at every n-th
    epoch's end, after every n-th optimizer step, where a drain is announced, and when training ends.

    Args:
        writer: where events go.
        staging_dir: a directory of rank 0's host, made if it is missing.
        drain: says when to save because a host is leaving.
        every_n_epochs: 0 for no periodic saves at epochs' ends.
        every_n_steps: None for no periodic saves within an epoch.
    """

    best_model_path = ""  # Lightning asks any Checkpoint for it; "" means that this one ranks no models

    def __init__(
        self,
        writer: EventWriter,
        *,
        staging_dir: Path,
        drain: DrainWatch,
        every_n_epochs: int,
        every_n_steps: int | None,
    ) -> None:
        self._writer = writer
        self._staging_dir = staging_dir
        self._drain = drain
        self._every_n_epochs = every_n_epochs
        self._every_n_steps = every_n_steps
        self._step = -1
        self._saved_at: int | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._step:
            return  # gradients are being accumulated: not a step's boundary
        self._step = trainer.global_step
        if self._drain.reached(trainer.strategy.root_device):
            self._save(trainer, "drain")
        elif self._every_n_steps and self._step % self._every_n_steps == 0:
            self._save(trainer, "periodic")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._every_n_epochs and (trainer.current_epoch + 1) % self._every_n_epochs == 0:
            self._save(trainer, "periodic")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._drain.close()
        if self._saved_at != trainer.global_step:
            self._save(trainer, "final")

    def _save(self, trainer: Any, reason: Reason) -> None:
        """Collective. A group in error raises, here or at the first barrier, before anything is written.

        Its results are NaN at best: nobody shall go on from them.
        """
        if trainer.fast_dev_run:
            return
        trainer.strategy.barrier("before a checkpoint")
        backend.require_healthy()
        directory = self._directory(trainer)
        try:
            with _synchronous(trainer.strategy):
                trainer.save_checkpoint(directory / CHECKPOINT_FILE, weights_only=False)  # ends with a barrier
            backend.require_healthy()
        except BaseException:
            if trainer.is_global_zero:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        self._saved_at = trainer.global_step
        self._writer.write(
            Checkpoint(
                path=str(directory) if trainer.is_global_zero else None,
                step=trainer.global_step,
                epoch=trainer.current_epoch,
                metrics=metrics(trainer),
                reason=reason,
            )
        )

    def _directory(self, trainer: Any) -> Path:
        if not trainer.is_global_zero:
            return self._staging_dir  # only rank 0 writes
        self._staging_dir.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"step{trainer.global_step:08d}-", dir=self._staging_dir))


@contextmanager
def _synchronous(strategy: Any) -> Iterator[None]:
    """Takes a plugin that writes in the background out of the way: what is handed over must be complete."""
    plugin = strategy.checkpoint_io
    if type(plugin).__name__ != "AsyncCheckpointIO":
        yield
        return
    strategy.checkpoint_io = plugin.checkpoint_io
    try:
        yield
    finally:
        strategy.checkpoint_io = plugin
