"""Where in an epoch a resumed fit goes on, also when the number of workers has changed meanwhile.

Lightning keeps the number of batches that each rank has finished, but then reads the epoch's data from its
start, and with another number of ranks that count means other samples. A distributed sampler has one order of
samples for any number of ranks W: batch k of all ranks together holds its samples [k·W·b, (k+1)·W·b). So k
finished batches on V ranks are ⌊k·V/W⌋ on W ranks, and those are left out. At most one batch of each rank is
seen twice; none is lost. Data without a batch sampler (iterable data sets) starts anew.
"""

import itertools
from collections.abc import Iterator
from typing import Any

SAVED_WORLD_SIZE = "mccl_world_size"


def batches_done(batches: int, *, of_ranks: int, on_ranks: int, multiple_of: int = 1) -> int:
    """How many batches of each of `on_ranks` ranks the samples fill that `of_ranks` ranks have finished.

    Args:
        batches: finished by each of `of_ranks` ranks.
        multiple_of: batches of one optimizer step; the result is a whole number of steps.
    """
    return batches * of_ranks // on_ranks // multiple_of * multiple_of


class EpochPosition:
    """Puts a resumed fit where the checkpoint was taken; mixed in before Lightning's Callback."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint[SAVED_WORLD_SIZE] = trainer.world_size

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Rewrites the batch counts, which Lightning reads from the checkpoint after this."""
        if trainer.state.fn != "fit" or "loops" not in checkpoint:
            return  # without loops it holds weights only, which Lightning itself then refuses to resume
        loop = checkpoint["loops"]["fit_loop"]
        epochs, batches = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]
        within_epoch = epochs["processed"] < epochs["ready"] and not batches["is_last_batch"]
        done = 0
        if within_epoch:
            before = batches["current"]["ready"]
            done = batches_done(
                before,
                of_ranks=checkpoint.get(SAVED_WORLD_SIZE, trainer.world_size),
                on_ranks=trainer.world_size,
                multiple_of=trainer.accumulate_grad_batches,
            )
            for counter in batches["current"]:
                batches["current"][counter] += done - before
        trainer.strategy.position = ResumedLoader(trainer, epoch=epochs["processed"], batches=done)


class ResumedLoader:
    """Makes a training loader start at a batch of an epoch, in that epoch only."""

    def __init__(self, trainer: Any, *, epoch: int, batches: int) -> None:
        self._trainer = trainer
        self._epoch = epoch
        self._batches = batches

    def first_batch(self) -> int:
        return self._batches if self._trainer.current_epoch <= self._epoch else 0

    def apply(self, loader: Any) -> None:
        """Changes a loader in place, unless it is not for training or resumes by itself."""
        if self._trainer.state.stage != "train" or hasattr(loader, "load_state_dict"):
            return
        sampler: Any = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            # Lightning does so later, when workers have begun to load by the order of epoch 0. Its current
            # epoch may still be the one that was finished before.
            sampler.set_epoch(max(self._trainer.current_epoch, self._epoch))
        if self._batches and getattr(loader, "batch_sampler", None) is not None:
            # A DataLoader's own __setattr__ forbids it, to protect a loader in use. This one is new.
            object.__setattr__(loader, "batch_sampler", LaterBatches(loader.batch_sampler, self))


class LaterBatches:
    """A batch sampler without the batches that were done before."""

    def __init__(self, batch_sampler: Any, position: ResumedLoader) -> None:
        self._batch_sampler = batch_sampler
        self._position = position

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._batch_sampler), self._position.first_batch(), None)

    def __len__(self) -> int:
        """Of a whole epoch, from which Lightning subtracts the batches that it counts as done."""
        return len(self._batch_sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch_sampler, name)
