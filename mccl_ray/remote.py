"""A fleet that exists already: its head's job server, over HTTP."""

from __future__ import annotations

import asyncio
import logging
import shlex
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.state import list_nodes

from mccl_core.settings import SettingsError
from mccl_ray import environ, exitcodes
from mccl_ray.config import JobSpec
from mccl_ray.events import OUTPUT, RESULT, Event, from_line

DEFAULT_PORT = 8265
UPLOAD_LIMIT_NBYTES = 100 * 1024 * 1024
# A Mac has these installed; a copy in the job's folder would shadow them there.
_NOT_UPLOADED = (
    ".git",
    ".venv",
    "__pycache__",
    "/mccl_core",
    "/mccl_lightning",
    "/mccl_ray",
    "/mccl_fleet",
    "/cli",
    "/build",
    "/runs",
    "/lightning_logs",
)
_CONNECT_TIMEOUT_S = 3.0
_SETTLE_TIMEOUT_S = 20.0
_SETTLE_POLL_S = 0.2


class NoHead(RuntimeError):
    """The head cannot be reached, or does not know the job; the text says what to do."""


class RemoteFleet:
    """The job server of one head. Methods block for one exchange of HTTP, `follow` until the job ends."""

    def __init__(self, address: str) -> None:
        self.address = _with_scheme(address)

    def connect(self) -> None:
        """Checks that a job server answers, within seconds.

        Raises:
            NoHead: it does not.
        """
        parts = urlsplit(self.address)
        host, port = parts.hostname or "", parts.port or DEFAULT_PORT
        remedy = "start the head there, or correct --address, MCCL_FLEET_ADDRESS or the profile"
        try:
            socket.create_connection((host, port), _CONNECT_TIMEOUT_S).close()
        except OSError as error:
            reason = "timed out" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise NoHead(f"no head at {self.address}: {reason}; {remedy}") from error
        for name in ("ray.dashboard", "ray._private.runtime_env"):  # they tell each step of an upload
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            self._client = JobSubmissionClient(self.address)
        except AuthenticationError as error:
            raise NoHead(
                f"the head at {self.address} wants a token: set RAY_AUTH_MODE=token, and "
                "RAY_AUTH_TOKEN_PATH to a file that holds the fleet's"
            ) from error
        except (ConnectionError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise NoHead(f"no Ray job server at {self.address}: {reason}; {remedy}") from error

    def submit(self, spec: JobSpec, *, name: str) -> None:
        """Uploads the job's folder and starts the job, under `name`.

        Raises:
            SettingsError: the script is outside the folder, or the folder is too large.
        """
        assert spec.workdir is not None
        if not spec.script.is_relative_to(spec.workdir):
            raise SettingsError(
                f"script: {str(spec.script)!r} is outside of the folder that is sent to the fleet, "
                f"{str(spec.workdir)!r}; set workdir to a folder that holds it"
            )
        sent = spec.model_copy(update={"script": spec.script.relative_to(spec.workdir), "workdir": None})
        job = sent.model_dump_json(exclude_unset=True)
        try:
            self._client.submit_job(
                entrypoint=f"python -m mccl_ray.driver {shlex.quote(name)} {shlex.quote(job)}",
                submission_id=name,
                metadata={"path": str(spec.storage / name), "workers": str(spec.workers)},
                runtime_env={
                    "working_dir": str(spec.workdir),
                    "excludes": list(_NOT_UPLOADED),
                    "env_vars": environ.for_driver({}),
                },
            )
        except (ValueError, RuntimeError) as error:
            if "exceed" not in str(error):
                raise
            raise SettingsError(
                f"workdir: {str(spec.workdir)!r} exceeds a head's limit of {UPLOAD_LIMIT_NBYTES >> 20} MiB; "
                "keep data and runs elsewhere, or set workdir to a smaller folder"
            ) from error

    def follow(self, job: str) -> Iterator[Event]:
        """Yields the job's events from its beginning until it has ended, the result last."""
        result_seen = False
        for event in _without_preamble(self._lines(job)):
            result_seen = result_seen or event["event"] == RESULT
            yield event
        if not result_seen:
            yield self._result_without_word(job)

    def events(self, job: str) -> list[Event]:
        """The job's events up to now."""
        text = self._ask(job, self._client.get_job_logs)
        return list(_without_preamble(text.splitlines()))

    def describe(self, job: str) -> dict[str, Any]:
        """What the head knows of a job.

        Raises:
            NoHead: there is no such job.
        """
        return _job_fields(self._ask(job, self._client.get_job_info))

    def jobs(self) -> list[dict[str, Any]]:
        """What the head knows of every job, the newest first."""
        jobs = [info for info in self._client.list_jobs() if info.submission_id]
        return [_job_fields(info) for info in sorted(jobs, key=lambda info: -(info.start_time or 0))]

    def cancel(self, job: str) -> bool:
        """Stops a job; False if it had ended already."""
        return bool(self._ask(job, self._client.stop_job))

    def nodes(self) -> list[dict[str, Any]]:
        """The live nodes of the fleet."""
        return [
            {
                "name": node.node_name,
                "ip": node.node_ip,
                "role": "head" if node.is_head_node else "mac",
                "pools": [name[5:] for name in node.resources_total or {} if name.startswith("pool:")],
                "node_id": node.node_id,
            }
            for node in list_nodes(address=self.address, filters=[("state", "=", "ALIVE")])
        ]

    def _lines(self, job: str) -> Iterator[str]:
        """The lines of the driver's output as they come; ends with the job."""
        chunks = self._client.tail_job_logs(job)
        rest = ""
        with asyncio.Runner() as runner:
            while (chunk := self._await(runner, chunks, job)) is not None:
                *lines, rest = (rest + chunk).split("\n")
                yield from lines
        if rest:
            yield rest

    def _await(self, runner: asyncio.Runner, chunks: Any, job: str) -> str | None:
        """The next piece of the output, None at its end."""
        try:
            return runner.run(_next(chunks))
        except (aiohttp.ClientError, RuntimeError) as error:
            raise NoHead(
                f"lost the head at {self.address} ({error}); the job may go on: `mccl-fleet status {job}`"
            ) from error

    def _result_without_word(self, job: str) -> Event:
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        status = self._client.get_job_status(job)
        while not status.is_terminal() and time.monotonic() < deadline:
            time.sleep(_SETTLE_POLL_S)
            status = self._client.get_job_status(job)
        cancelled = status == JobStatus.STOPPED
        message = self._client.get_job_info(job).message or f"the driver ended as {status}"
        return {
            "event": RESULT,
            "run": job,
            "status": "cancelled" if cancelled else "failed",
            "error": "the job was cancelled" if cancelled else message,
            "exit_code": exitcodes.FAILED,
        }

    def _ask(self, job: str, question: Any) -> Any:
        try:
            return question(job)
        except RuntimeError as error:
            if "does not exist" not in str(error):
                raise
            raise NoHead(f"{self.address} knows no job {job!r}; `mccl-fleet status` lists them") from error


def _without_preamble(lines: Iterable[str]) -> Iterator[Event]:
    """The events of a driver's output; what comes before its first event is told only if none comes."""
    preamble: list[Event] | None = []
    for line in lines:
        event = from_line(line) or {"event": OUTPUT, "text": line}
        if preamble is not None and event["event"] == OUTPUT:
            preamble.append(event)
            continue
        preamble = None
        yield event
    yield from preamble or []


async def _next(chunks: Any) -> str | None:
    return await anext(chunks, None)


def _with_scheme(address: str) -> str:
    """A URL with scheme and port: "head" becomes "http://head:8265".

    Raises:
        SettingsError: it is no address.
    """
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise SettingsError(
            f"address: {address!r} is not host:port; correct --address, MCCL_FLEET_ADDRESS or the profile"
        )
    return url if port else f"{parts.scheme}://{host}:{DEFAULT_PORT}"


def _job_fields(info: Any) -> dict[str, Any]:
    metadata = info.metadata or {}
    return {
        "job": info.submission_id,
        "status": str(info.status.value).lower(),
        "message": info.message,
        "started": (info.start_time or 0) / 1000,
        "ended": info.end_time / 1000 if info.end_time else None,
        "path": metadata.get("path"),
    }


def log_file(path: str, rank: int) -> Path:
    """Where the output of one rank's script is, on the job's storage."""
    return Path(path) / "logs" / f"rank-{rank}.log"
