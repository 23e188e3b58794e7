"""What the reporter reads from a batch and when it writes a step."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mccl_lightning.contract import Step, decode
from mccl_lightning.events import EventWriter
from mccl_lightning.reporter import Reporter, batch_size


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(5, 2), 5),
        (torch.tensor(1.0), 1),
        ([torch.zeros(4), torch.zeros(9)], 4),
        ({"ids": [["a"], torch.zeros(3, 3)]}, 3),
        (("text", 7), None),
        (None, None),
    ],
)
def test_batch_size_is_the_first_tensors_length(batch: Any, size: int | None) -> None:
    assert batch_size(batch) == size


@pytest.fixture
def pipe() -> Any:
    reader, writer = os.pipe()
    yield SimpleNamespace(reader=reader, writer=EventWriter(writer))
    os.close(reader)
    os.close(writer)


def test_steps_are_thinned_out_by_time_but_for_an_epochs_last(pipe: Any) -> None:
    now = [0.0]
    reporter = Reporter(pipe.writer, progress_interval_s=1.0, clock=lambda: now[0])
    reporter._throughput.run()
    trainer = SimpleNamespace(global_step=0, current_epoch=2, is_last_batch=False, accumulate_grad_batches=2)
    outputs = {"loss": torch.tensor(0.25)}
    for last in (False, False, False, True):
        now[0] += 0.4
        trainer.global_step += 1
        trainer.is_last_batch = last
        reporter.on_train_batch_end(trainer, None, outputs, torch.zeros(8, 1), 0)
    events = [decode(line) for line in os.read(pipe.reader, 4096).splitlines()]
    assert events == [
        Step(step=3, epoch=2, batch_size=8, samples_per_s=pytest.approx(20), loss=0.5),
        Step(step=4, epoch=2, batch_size=8, samples_per_s=pytest.approx(20), loss=0.5),
    ]


def test_a_gone_worker_ends_training() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    reporter = Reporter(EventWriter(writer), progress_interval_s=1.0)
    with pytest.raises(BrokenPipeError):
        reporter.on_exception(None, None, ValueError("x"))
    os.close(writer)


def test_without_a_pipe_nothing_is_written() -> None:
    Reporter(EventWriter(None), progress_interval_s=1.0).on_exception(None, None, ValueError("x"))
