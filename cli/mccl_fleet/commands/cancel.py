"""`mccl-fleet cancel JOB`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mccl_fleet.options import Address, Json, Profile, head_address, head_errors, one_message
from mccl_ray.remote import RemoteFleet


def cancel(
    job: Annotated[str, typer.Argument(help="The job's name, as `submit` and `status` print it.")],
    address: Address = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Stops a job; its checkpoints and logs stay."""
    with one_message(), head_errors():
        fleet = RemoteFleet(head_address(address, profile))
        fleet.connect()
        stopped = fleet.cancel(job)
    if as_json:
        print(json.dumps({"job": job, "cancelled": stopped}))
    else:
        print(f"{job}: {'cancelled' if stopped else 'had ended already'}")
