"""What each Ray worker does: run the script as a child, forward its events, checkpoint, report its death.

The worker itself makes no process group and never imports torch: the script makes the group, on its own
main thread.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.collective import broadcast_from_rank_zero

from mccl_lightning import contract
from mccl_ray import environ, events
from mccl_ray.fleet import host_name
from mccl_ray.process import LoggedProcess, describe_exit, write_private

_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)(: |$)")


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """What every worker of a run is told, whatever its rank."""

    script: str
    """Absolute, or relative to `workdir`."""
    args: tuple[str, ...]
    workdir: str | None
    """None: the folder that Ray unpacked for the job."""
    env: dict[str, str]
    logs: str
    every_n_epochs: int
    every_n_steps: int | None
    progress_interval_s: float
    board: Any


class ScriptFailed(RuntimeError):
    """The script of one rank ended with an error; the text names rank, host, exit and the last lines."""


def run_worker(config: dict[str, Any]) -> None:
    """The training loop that Ray Train runs on every worker: returns once this rank's script has succeeded.

    Raises:
        ScriptFailed: the script ended otherwise.
    """
    plan: WorkerPlan = config["plan"]
    context = ray.train.get_context()
    rank = context.get_world_rank()
    meeting = broadcast_from_rank_zero(_pick_meeting_point() if rank == 0 else None)
    with ExitStack() as stack:
        private = stack.enter_context(_private_directory())
        checkpoint = ray.train.get_checkpoint()
        resume = stack.enter_context(checkpoint.as_directory()) if checkpoint else None
        secret_file = private / "secret"
        write_private(secret_file, ray.get(plan.board.secret.remote()))
        fleet = contract.FleetEnvironment(
            rank=rank,
            world_size=context.get_world_size(),
            node_rank=context.get_node_rank(),
            master_addr=meeting["address"],
            master_port=meeting["port"],
            staging_dir=str(private),
            resume_from=str(Path(resume) / contract.CHECKPOINT_FILE) if resume else None,
            checkpoint_every_n_epochs=plan.every_n_epochs,
            checkpoint_every_n_steps=plan.every_n_steps,
            progress_interval_s=plan.progress_interval_s,
        )
        ScriptRun(plan, fleet, private, secret_file).run()


class ScriptRun:
    """One rank's run of the script."""

    def __init__(self, plan: WorkerPlan, fleet: contract.FleetEnvironment, private: Path, secret_file: Path) -> None:
        self._plan = plan
        self._fleet = fleet
        self._private = private
        self._secret_file = secret_file
        self._identity = {
            "rank": fleet.rank,
            "host": host_name(ray.get_runtime_context().get_node_id()),
            "ip": ray.util.get_node_ip_address(),
        }
        self._last_post: Any = None
        self._error: str | None = None
        self._failure: str | None = None

    def run(self) -> None:
        """Blocks until the script has ended.

        Raises:
            ScriptFailed: it did not end with exit code 0.
        """
        reader, writer = os.pipe()
        self._process = LoggedProcess(
            self._command(),
            cwd=self._workdir(),
            environ=self._environ(writer),
            log_path=Path(self._plan.logs) / f"rank-{self._fleet.rank}.log",
            pass_fds=(writer,),
            cleanup=self._private,
            on_line=self._forward_output,
            on_exit=self._note_exit,
        )
        with os.fdopen(reader, "rb") as lines:
            try:
                self._process.start()
            finally:
                os.close(writer)
            try:
                for line in lines:
                    self._handle(contract.decode(line))
            except BaseException:
                self._process.kill()
                raise
        self._process.wait()
        if self._last_post is not None:
            ray.get(self._last_post)
        if self._failure:
            raise ScriptFailed(self._failure)

    def _workdir(self) -> Path:
        return Path(self._plan.workdir) if self._plan.workdir else Path.cwd()

    def _command(self) -> list[str]:
        return [sys.executable, "-u", str(self._workdir() / self._plan.script), *self._plan.args]

    def _environ(self, events_fd: int) -> dict[str, str]:
        added = replace(self._fleet, events_fd=events_fd).to_environ()
        added[environ.SECRET_FILE] = str(self._secret_file)
        added[environ.HOST_NAME] = str(self._identity["host"])
        return environ.for_script(environ.snapshot(), {**added, **self._plan.env})

    def _handle(self, event: contract.Event) -> None:
        if isinstance(event, contract.Checkpoint):
            self._report(event)
        elif isinstance(event, contract.Error):
            self._error = event.message
        fields = asdict(event)
        fields.pop("path", None)  # of the copy on its way, gone by now
        self._post(event.event, **fields)

    def _report(self, event: contract.Checkpoint) -> None:
        """Hands a checkpoint to Ray Train, which copies it to the storage; all ranks meet here."""
        metrics = {**event.metrics, "step": event.step, "epoch": event.epoch}
        if event.path is None:
            ray.train.report(metrics)
            return
        checkpoint = ray.train.Checkpoint.from_directory(event.path)
        ray.train.report(metrics, checkpoint=checkpoint, delete_local_checkpoint_after_upload=True)

    def _forward_output(self, line: str) -> None:
        if self._fleet.rank == 0:
            self._post(events.OUTPUT, text=line)

    def _note_exit(self, returncode: int) -> None:
        """Tells the driver of a failure at once, even while this rank waits for others in a report."""
        if returncode == 0:
            return
        how = describe_exit(returncode)
        tail = self._process.tail()
        # A killed script's last words tell nothing about its death.
        reason = "" if returncode < 0 else self._error or _last_words(tail)
        where = f"rank {self._fleet.rank} on {self._identity['host']} ({self._identity['ip']})"
        self._post(events.DIED, what="script", how=how, message=reason, tail=tail)
        self._failure = "\n".join([f"{where}: the script ended: {how}" + (f": {reason}" if reason else ""), *tail])

    def _post(self, kind: str, **fields: Any) -> None:
        event = {**fields, "event": kind, "time": time.time(), **self._identity}
        self._last_post = self._plan.board.post.remote(event)


def _last_words(tail: list[str]) -> str:
    """The last line that looks like an exception, or else the last one."""
    lines = [line.strip() for line in tail if line.strip()]
    exceptions = [line for line in lines if _EXCEPTION.match(line)]
    return (exceptions or lines or ["it printed nothing"])[-1]


def _pick_meeting_point() -> dict[str, Any]:
    """This node's address and a port that is free on it now; rank 0's script listens there."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return {"address": ray.util.get_node_ip_address(), "port": probe.getsockname()[1]}


@contextmanager
def _private_directory() -> Iterator[Path]:
    """A directory that only this user may enter, for the secret and for checkpoints on their way."""
    with tempfile.TemporaryDirectory(prefix="mccl-worker-", ignore_cleanup_errors=True) as path:
        yield Path(path)
