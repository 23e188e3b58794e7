"""`mccl-fleet config show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mccl_fleet import config
from mccl_fleet.options import Json, Profile, one_message
from mccl_fleet.tables import print_table
from mccl_ray import environ
from mccl_ray.config import OF_ONE_HOST
from mccl_ray.jobfile import load_job


def config_show(
    job_file: Annotated[Path | None, typer.Argument(help="A job file, to see the job's values too.")] = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Prints each value of the configuration with where it came from."""
    variables = environ.snapshot()
    with one_message():
        rows = [("fleet", *row) for row in config.load(environ=variables, profile=profile).rows()]
        if job_file is not None:
            job = load_job(job_file, environ=variables)
            rows += [("job", *row) for row in job.rows() if row[0].removeprefix("core.") not in OF_ONE_HOST]
    if as_json:
        for section, field, value, source in rows:
            row = {"section": section, "field": field, "value": value, "source": source}
            print(json.dumps(row, default=str))
        return
    print_table(
        ("", "field", "value", "from"),
        [(section, field, _text(value), source) for section, field, value, source in rows],
    )


def _text(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, tuple):
        return " ".join(value) or "none"
    if isinstance(value, dict):
        return " ".join(f"{name}={item}" for name, item in value.items()) or "none"
    return str(value)
