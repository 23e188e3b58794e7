"""What Ray Train's controller tells the driver: who works where, which worker died, that the job restarts.

Runs inside the controller's process, on Ray Train's callback interface for developers.
"""

from __future__ import annotations

import time
from typing import Any

from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller.state import ReschedulingState, RestartingState

from mccl_ray import events
from mccl_ray.fleet import host_name
from mccl_ray.worker import ScriptFailed


class Supervisor(WorkerGroupCallback, ControllerCallback):  # type: ignore[misc,unused-ignore]
    """Posts the life of the worker group to the board."""

    def __init__(self, board: Any) -> None:
        self._board = board
        self._attempt = 0
        self._workers: list[dict[str, Any]] = []
        self._reported: set[int] = set()

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._attempt += 1
        self._reported = set()
        self._workers = [
            {
                "rank": worker.distributed_context.world_rank,
                "host": host_name(worker.metadata.node_id),
                "ip": worker.metadata.node_ip,
                "pid": worker.metadata.pid,
            }
            for worker in worker_group.get_workers()
        ]
        self._post(events.WORKERS, attempt=self._attempt, workers=self._workers)

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        for rank, error in worker_group_status.errors.items():
            if rank in self._reported or isinstance(error, ScriptFailed):
                continue
            self._reported.add(rank)
            how, message = _explain(error)
            worker = self._workers[rank] if rank < len(self._workers) else {"rank": rank}
            self._post(events.DIED, **worker, what="worker", how=how, message=message, tail=[])

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        if isinstance(current_state, RestartingState):
            self._post(events.RESTARTING)
        elif isinstance(current_state, ReschedulingState):
            error = getattr(current_state.training_failed_error, "controller_failure", None)
            self._post(events.WAITING, message=str(error or "workers could not be placed").splitlines()[0])

    def _post(self, kind: str, **fields: Any) -> None:
        self._board.post.remote({**fields, "event": kind, "time": time.time()})


def _explain(error: Exception) -> tuple[str, str]:
    """How a worker was lost, and why as far as Ray knows, in one line each."""
    if isinstance(error, WorkerHealthCheckFailedError):
        error = error.health_check_failure
    text = str(error)
    if isinstance(error, RayActorError):
        left = "node" in text and "process has died" not in text
        return ("its Mac left the fleet" if left else "the Ray worker's process died (killed or crashed)"), ""
    return f"the Ray worker failed with {type(error).__name__}", text.partition("\n")[0]
