"""Runs a job's script on the fleet with Ray Train, from the placement of its workers to the result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import BackendConfig, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.exceptions import TrainingFailedError

from mccl_ray.board import start_board
from mccl_ray.config import RUN_DIR, JobSpec
from mccl_ray.events import RUN, Event
from mccl_ray.fleet import require_macs
from mccl_ray.journal import Journal
from mccl_ray.supervisor import Supervisor
from mccl_ray.train_v2 import FleetTrainer
from mccl_ray.worker import WorkerPlan, run_worker

_TAKE_TIMEOUT_S = 1.0
_MAX_ERROR_CHARS = 1000


def run_job(spec: JobSpec, *, run: str, secret: bytes, emit: Callable[[Event], None]) -> Event:
    """Trains until the script has finished on every worker or the job gives up; returns the result.

    Ray must be connected. `spec.storage` must be absolute; `spec.workdir` absolute, or None for the folder
    that Ray unpacked. `emit` receives each event on a thread of this function.

    Raises:
        NotEnoughMacs: the fleet has fewer Macs than the job has workers.
        OSError: the storage cannot be written.
    """
    macs = require_macs(spec.pool, spec.workers)
    path = spec.storage / run
    journal = Journal(path, run=run, max_failures=spec.max_failures, emit=emit)
    journal.open()
    board = start_board(secret)
    journal.record(
        {
            "event": RUN,
            "run": run,
            "name": spec.name,
            "script": str(spec.script),
            "workers": spec.workers,
            "macs": macs,
            "path": str(path),
            "logs": str(path / "logs"),
        }
    )
    trainer = _trainer(spec, run=run, board=board, logs=path / "logs")
    error: str | None = None
    checkpoint: str | None = None
    with _Pump(board, journal):
        try:
            result = trainer.fit()
            checkpoint = result.checkpoint.path if result.checkpoint else None
        except (TrainingFailedError, RayError) as failure:
            error = " ".join(str(failure).split())[:_MAX_ERROR_CHARS]
    if error is not None:
        error = journal.cause() or error
        checkpoint = _latest_checkpoint(path)
    return journal.finish(error=error, checkpoint=checkpoint)


class _Pump:
    """While open, moves events from the board to the journal on a thread; closing it empties the board."""

    def __init__(self, board: Any, journal: Journal) -> None:
        self._board = board
        self._journal = journal
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._move, name="events", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *unused: object) -> None:
        self._stop.set()
        self._thread.join()

    def _move(self) -> None:
        while True:
            stopping = self._stop.is_set()
            batch = ray.get(self._board.take.remote(0.05 if stopping else _TAKE_TIMEOUT_S))
            for event in batch:
                self._journal.record(event)
            if stopping and not batch:
                return


def _trainer(spec: JobSpec, *, run: str, board: Any, logs: Path) -> FleetTrainer:
    plan = WorkerPlan(
        script=str(spec.script),
        args=tuple(arg.replace(RUN_DIR, str(logs.parent)) for arg in spec.args),
        workdir=str(spec.workdir) if spec.workdir else None,
        env={**spec.core_environ(), **spec.env},
        logs=str(logs),
        every_n_epochs=spec.checkpoint.every_n_epochs,
        every_n_steps=spec.checkpoint.every_n_steps,
        progress_interval_s=spec.progress_interval_s,
        board=board,
    )
    return FleetTrainer(
        run_worker,
        train_loop_config={"plan": plan},
        # The script makes the process group, in its own process: the worker needs none, nor torch.
        backend_config=BackendConfig(),
        # A Mac is a unit of our own resource, never a GPU: for those Ray would set up NCCL.
        scaling_config=ScalingConfig(
            num_workers=spec.workers,
            use_gpu=False,
            resources_per_worker={f"pool:{spec.pool}": 1},
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(
            name=run,
            storage_path=str(spec.storage),
            failure_config=FailureConfig(max_failures=spec.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=spec.checkpoint.keep),
            callbacks=[Supervisor(board)],
        ),
    )


def _latest_checkpoint(path: Path) -> str | None:
    """The newest checkpoint folder of a run that failed."""
    folders = sorted(path.glob("checkpoint_*"), key=lambda folder: folder.stat().st_mtime)
    return str(folders[-1]) if folders else None
