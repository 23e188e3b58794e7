"""The callback that tells the fleet worker how a fit is going."""

import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from mccl_lightning import backend
from mccl_lightning.contract import Error, Finished, Started, Step, Validation
from mccl_lightning.events import EventWriter
from mccl_lightning.throughput import Throughput


class Reporter:
    """Writes every event but checkpoints, on every rank; mixed in before Lightning's Callback.

    Args:
        writer: where events go.
        progress_interval_s: the least number of seconds between two step events. An epoch's last step has one
            in any case.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        writer: EventWriter,
        *,
        progress_interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writer = writer
        self._interval_s = progress_interval_s
        self._clock = clock
        self._throughput = Throughput(clock)
        self._all_reduced_before: tuple[int, int] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._throughput = Throughput(self._clock)
        self._all_reduced_before = backend.all_reduced()
        total = trainer.estimated_stepping_batches
        self._writer.write(
            Started(
                rank=trainer.global_rank,
                world_size=trainer.world_size,
                host=socket.gethostname(),
                pid=os.getpid(),
                strategy=getattr(trainer.strategy, "strategy_name", type(trainer.strategy).__name__),
                device=str(trainer.strategy.root_device),
                backend=backend.name(),
                max_epochs=trainer.max_epochs,
                max_steps=trainer.max_steps,
                total_steps=int(total) if math.isfinite(total) else None,
            )
        )
        self._throughput.run()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        size = batch_size(batch)
        self._throughput.add(size)
        if self._throughput.since_mark_s() < self._interval_s and not trainer.is_last_batch:
            return
        loss = _loss(outputs)
        self._writer.write(
            Step(
                step=trainer.global_step,
                epoch=trainer.current_epoch,
                batch_size=size,
                samples_per_s=self._throughput.mark(),
                # Lightning hands over the loss divided for the accumulation of gradients.
                loss=None if loss is None else loss * trainer.accumulate_grad_batches,
            )
        )

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._throughput.pause()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._throughput.run()
        self._writer.write(Validation(step=trainer.global_step, epoch=trainer.current_epoch, metrics=metrics(trainer)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._throughput.pause()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        now, before = backend.all_reduced(), self._all_reduced_before
        moved = None if now is None or before is None else (now[0] - before[0], now[1] - before[1])
        self._writer.write(
            Finished(
                step=trainer.global_step,
                epoch=trainer.current_epoch,
                metrics=metrics(trainer),
                samples=self._throughput.samples,
                samples_per_s=self._throughput.rate(),
                bytes_all_reduced=moved[0] if moved else None,
                all_reduces=moved[1] if moved else None,
            )
        )

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._writer.write(Error(message=f"{type(exception).__name__}: {exception}"))


def metrics(trainer: Any) -> dict[str, float]:
    """What the script logged last, by name; waits for the device."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def batch_size(batch: Any) -> int | None:
    """The first tensor's leading length, however deep it lies; None where a batch holds no tensor."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = batch.values()
    if not isinstance(batch, Iterable) or isinstance(batch, (str, bytes)):
        return None
    return next((size for size in map(batch_size, batch) if size is not None), None)


def _loss(outputs: Any) -> float | None:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return float(loss) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
