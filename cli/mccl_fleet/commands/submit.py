"""`mccl-fleet submit job.yaml`."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from mccl_core.settings import SettingsError
from mccl_fleet import config
from mccl_fleet.options import Address, Json, Profile, fail, head_errors, one_message
from mccl_fleet.render import choose_renderer
from mccl_ray import environ, exitcodes, local_run
from mccl_ray.config import JobSpec
from mccl_ray.events import RESULT, Event
from mccl_ray.jobfile import load_job
from mccl_ray.journal import FINISHED
from mccl_ray.local_fleet import FleetStartError
from mccl_ray.remote import RemoteFleet


def submit(
    job_file: Annotated[Path, typer.Argument(help="The job, a YAML file.")],
    follow: Annotated[bool, typer.Option(help="Show the job until it has ended (remote fleets only).")] = True,
    address: Address = None,
    profile: Profile = None,
    local_macs: Annotated[
        int | None, typer.Option(min=1, help="Macs of the fleet that is started here where there is no head.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Instead of the job file's workers.")] = None,
    storage: Annotated[Path | None, typer.Option(help="Instead of the job file's storage.")] = None,
    max_failures: Annotated[int | None, typer.Option(min=0, help="Instead of the job file's.")] = None,
    as_json: Json = False,
) -> None:
    """Trains a job on a fleet; without a head on one that is started here for this job.

    Exit status: 0 training finished, 1 it failed or was cancelled, 2 bad input, 3 no reachable head, 4 not
    enough Macs, 130 interrupted.
    """
    variables = environ.snapshot()
    arguments: dict[str, Any] = {"workers": workers, "storage": storage, "max_failures": max_failures}
    with one_message():
        client = config.load(
            environ=variables, profile=profile, arguments={"address": address, "local_macs": local_macs}
        ).values
        spec = load_job(job_file, environ=variables, arguments=arguments).values
        if client.address is None:
            if not follow:
                raise SettingsError("--no-follow needs a head: a fleet of this machine ends with its command")
            local_run.check(spec, macs=client.local_macs, env=variables)
        elif variables.get(environ.SECRET) or variables.get(environ.SECRET_FILE):
            print(
                "note: the secret of this shell is not sent; the head makes one for the job "
                "(to use your own, name a file on every Mac in the job's env: {MCCL_SECRET_FILE: …})",
                file=sys.stderr,
            )
    name = f"{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    if client.address is None:
        events = local_run.run(spec, name=name, macs=client.local_macs, env=variables)
        farewell = "interrupted: the job and its fleet were stopped"
    else:
        events = remote_events(client.address, spec, name, follow)
        farewell = f"interrupted: the job goes on; `mccl-fleet cancel {name}` stops it"
    try:
        status = _render(events, as_json=as_json)
    except KeyboardInterrupt:
        raise fail(farewell, exitcodes.INTERRUPTED) from None
    raise typer.Exit(status)


def remote_events(address: str, spec: JobSpec, name: str, follow: bool) -> Iterator[Event]:
    """Sends the job to the head; yields what it tells, to its end if `follow`."""
    with one_message(), head_errors():
        fleet = RemoteFleet(address)
        fleet.connect()
        fleet.submit(spec, name=name)
        yield {"event": "submitted", "job": name, "address": fleet.address}
        if follow:
            yield from fleet.follow(name)


def _render(events: Iterator[Event], *, as_json: bool) -> int:
    """Shows every event and returns the exit status that the result asks for."""
    status = exitcodes.OK
    try:
        with closing(events), choose_renderer(as_json=as_json) as renderer:  # type: ignore[type-var]
            for event in events:
                renderer.show(event)
                if event["event"] == RESULT:
                    finished = event["status"] == FINISHED
                    status = exitcodes.OK if finished else event.get("exit_code", exitcodes.FAILED)
    except FleetStartError as error:
        raise fail(f"the local fleet could not start: {error}", exitcodes.FAILED) from None
    return status
