"""`mccl-fleet logs JOB`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mccl_fleet.options import Address, Json, Profile, fail, head_address, head_errors, one_message
from mccl_ray import exitcodes
from mccl_ray.events import OUTPUT
from mccl_ray.remote import RemoteFleet, log_file


def logs(
    job: Annotated[str, typer.Argument(help="The job's name, as `submit` and `status` print it.")],
    rank: Annotated[int, typer.Option(min=0, help="Of which worker; all but 0 are read from the job's storage.")] = 0,
    address: Address = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Prints what the script of one worker has printed up to now."""
    with one_message(), head_errors():
        fleet = RemoteFleet(head_address(address, profile))
        fleet.connect()
        described = fleet.describe(job)
        if rank == 0:
            lines = [event["text"] for event in fleet.events(job) if event["event"] == OUTPUT]
        else:
            path = log_file(described["path"], rank)
            if not path.is_file():
                raise fail(
                    f"there is no {path} on this machine; mount the job's storage, or check the rank",
                    exitcodes.BAD_INPUT,
                )
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        print(json.dumps({"rank": rank, "text": line}) if as_json else line)
