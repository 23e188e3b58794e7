"""`mccl-fleet status [JOB]`."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from mccl_fleet.options import Address, Json, Profile, head_address, head_errors, one_message
from mccl_fleet.tables import print_table
from mccl_ray.events import Event
from mccl_ray.progress import Progress
from mccl_ray.remote import RemoteFleet


def status(
    job: Annotated[str | None, typer.Argument(help="One job. Default: all of them.")] = None,
    address: Address = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Lists the jobs of a fleet, or tells how one job is doing."""
    with one_message(), head_errors():
        fleet = RemoteFleet(head_address(address, profile))
        fleet.connect()
        jobs = [fleet.describe(job)] if job else fleet.jobs()
        events = fleet.events(job) if job else []
    if job:
        jobs[0].update(_progress(events))
    if as_json:
        for fields in jobs:
            print(json.dumps(fields, default=str))
    elif job:
        for name, value in jobs[0].items():
            print(f"{name}: {_text(name, value)}")
    else:
        print_table(("job", "status", "started", "seconds"), [_row(fields) for fields in jobs])


def _progress(events: list[Event]) -> dict[str, Any]:
    progress = Progress()
    for event in events:
        progress.add(event)
    return progress.fields()


def _row(fields: dict[str, Any]) -> tuple[str, str, str, str]:
    seconds = (fields["ended"] or time.time()) - fields["started"]
    return fields["job"], fields["status"], _text("started", fields["started"]), f"{seconds:.0f}"


def _text(name: str, value: Any) -> str:
    if name in ("started", "ended") and value is not None:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if isinstance(value, dict):
        return ", ".join(
            f"{key} {number:.4g}" if isinstance(number, float) else f"{key} {number}" for key, number in value.items()
        )
    return str(value)
