"""`mccl-fleet tune --output FILE`."""

from __future__ import annotations

import json
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from mccl_core.links import PRINTED_PREFIX
from mccl_core.settings import SettingsError
from mccl_fleet import config
from mccl_fleet.commands.submit import remote_events
from mccl_fleet.options import Address, Json, Profile, fail, head_errors, one_message
from mccl_fleet.render import PlainRenderer
from mccl_ray import environ, exitcodes, local_run
from mccl_ray.config import JobSpec
from mccl_ray.events import OUTPUT, RESULT, Event
from mccl_ray.fleet_size import require
from mccl_ray.jobfile import load_job
from mccl_ray.journal import FINISHED
from mccl_ray.local_fleet import FleetStartError
from mccl_ray.remote import RemoteFleet

_SCRIPT = "from mccl_core.tune import main\n\nmain()\n"


def tune(
    output: Annotated[Path, typer.Option(help="Where the link profile is written.")],
    workers: Annotated[
        int | None, typer.Option(min=2, help="Macs to measure between. Default: all of the pool.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.01, max=3600, help="Measuring time of one point; there are up to 18.")
    ] = 1.0,
    pool: Annotated[str, typer.Option(help="The pool to take the Macs from.")] = "mac",
    storage: Annotated[
        Path | None, typer.Option(help="A folder that every Mac mounts, for the logs. Default: as of a job.")
    ] = None,
    address: Address = None,
    profile: Profile = None,
    local_macs: Annotated[
        int | None, typer.Option(min=2, help="Macs of the fleet that is started here where there is no head.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measures the fleet's link once, as a job, and writes the link profile that jobs then choose their algorithms by.

    Exit status: as of `submit`.
    """
    variables = environ.snapshot()
    with one_message(), tempfile.TemporaryDirectory(prefix="mccl-tune-") as folder:
        if not output.absolute().parent.is_dir() or output.is_dir():
            raise SettingsError(f"--output: {str(output)!r} cannot be written; name a file in a folder that exists")
        arguments = {"address": address, "local_macs": local_macs}
        client = config.load(environ=variables, profile=profile, arguments=arguments).values
        wanted = workers or (_macs(client.address, pool) if client.address else client.local_macs)
        job = {"workers": wanted, "pool": pool, "storage": storage or (None if client.address else Path(folder))}
        spec = _job(Path(folder), variables, job, seconds)
        name = f"tune-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        if client.address is None:
            local_run.check(spec, macs=client.local_macs, env=variables)
            events = local_run.run(spec, name=name, macs=client.local_macs, env=variables)
            farewell = "interrupted: the job and its fleet were stopped, nothing was written"
        else:
            events = remote_events(client.address, spec, name, True)
            farewell = f"interrupted: the job goes on; `mccl-fleet cancel {name}` stops it"
        try:
            text = _follow(events, quiet=as_json)
        except KeyboardInterrupt:
            raise fail(farewell, exitcodes.INTERRUPTED) from None
        output.write_text(text)
    if as_json:
        print(json.dumps({"output": str(output), "profile": yaml.safe_load(text)}))
    else:
        print(f"{text}written to {output}; jobs use it with MCCL_LINK_PROFILE or `core: {{link_profile: FILE}}`")


def _job(folder: Path, variables: dict[str, str], arguments: dict[str, Any], seconds: float) -> JobSpec:
    """The job, read as `submit` reads one, so that MCCL_* variables are measured with as they are trained with."""
    command = shlex.join(["mccl-fleet", "tune", *sys.argv[2:]])
    (folder / "tune_link.py").write_text(_SCRIPT)
    fields = {
        "name": "tune",
        "script": "tune_link.py",
        "args": ["--seconds", str(seconds), "--command", command],
        "max_failures": 0,
    }
    (folder / "tune.yaml").write_text(yaml.safe_dump(fields))
    return load_job(folder / "tune.yaml", environ=variables, arguments=arguments).values


def _macs(address: str, pool: str) -> int:
    """The Macs of the pool, of which a link needs two.

    Raises:
        NotEnoughMacs: there are fewer.
    """
    with head_errors():
        fleet = RemoteFleet(address)
        fleet.connect()
        names = [str(node["name"]) for node in fleet.nodes() if pool in node["pools"]]
    require(pool, 2, names, remedy="join more Macs")
    return len(names)


def _follow(events: Iterator[Event], *, quiet: bool) -> str:
    """Shows the job's events until its end; returns the profile that rank 0 has printed."""
    printed: str | None = None
    result: Event = {}
    try:
        with closing(events), PlainRenderer() as renderer:  # type: ignore[type-var]
            for event in events:
                text = event["text"] if event["event"] == OUTPUT else None
                if event["event"] == RESULT:
                    result = event
                elif text is not None and text.startswith(PRINTED_PREFIX):
                    printed = json.loads(text.removeprefix(PRINTED_PREFIX))
                elif not quiet:
                    renderer.show(event)
    except FleetStartError as error:
        raise fail(f"the local fleet could not start: {error}", exitcodes.FAILED) from None
    if result.get("status") != FINISHED:
        raise fail(str(result.get("error")), int(result.get("exit_code", exitcodes.FAILED)))
    if printed is None:
        raise fail("the job printed no profile; its versions of mccl-fleet may differ", exitcodes.FAILED)
    return printed
