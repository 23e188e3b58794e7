"""Runs a job on a fleet that exists for this job only, on this machine.

The same driver as on a remote head, but as a child process instead of through Ray's job submission: that
would need the head's dashboard and job server (several seconds and processes more) and would train in a
copy of the folder.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mccl_ray import environ, exitcodes, preflight
from mccl_ray.config import JobSpec
from mccl_ray.events import OUTPUT, RESULT, Event, from_line
from mccl_ray.fleet_size import require
from mccl_ray.local_fleet import POOL_OF_LOCAL_MACS, LocalFleet
from mccl_ray.process import guarded, kill_group

FLEET = "fleet"
"""Event: the local fleet is starting or is up: message."""


def check(spec: JobSpec, *, macs: int, env: Mapping[str, str]) -> None:
    """Finds what would make the run fail, before anything is started.

    Raises:
        NotEnoughMacs: the job has more workers than the fleet will have Macs.
        ValueError: the user's secret cannot be used, or another package has registered `mccl`.
    """
    names = [f"local-mac-{index + 1}" for index in range(macs if spec.pool == POOL_OF_LOCAL_MACS else 0)]
    remedy = f"pass --local-macs {spec.workers}"
    if not names:
        remedy = (
            f"a fleet on this machine has the pool {POOL_OF_LOCAL_MACS!r} only: set that, or name a head (--address)"
        )
    require(spec.pool, spec.workers, names, remedy=remedy)
    preflight.check(env)


def run(spec: JobSpec, *, name: str, macs: int, env: Mapping[str, str]) -> Iterator[Event]:
    """Yields the job's events, the result last; the fleet stops when the iterator ends or is closed.

    Raises:
        FleetStartError: Ray did not start.
    """
    yield {"event": FLEET, "message": f"starting a fleet of {macs} local Mac{'' if macs == 1 else 's'}"}
    with LocalFleet(macs, env) as fleet, _driver(spec, name, fleet.address, fleet.env) as process:
        assert process.stdout is not None
        result_seen = False
        for line in process.stdout:
            event = from_line(line)
            yield event or {"event": OUTPUT, "text": line.rstrip("\n")}
            result_seen = result_seen or (event is not None and event["event"] == RESULT)
        status = process.wait()
        if not result_seen:
            yield {
                "event": RESULT,
                "run": name,
                "status": "failed",
                "error": f"the driver ended with status {status} and no result",
                "exit_code": exitcodes.FAILED,
            }


@contextmanager
def _driver(spec: JobSpec, name: str, address: str, env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "mccl_ray.driver", name, "-"]
    process = subprocess.Popen(
        guarded(command),
        env={**environ.for_local_driver(env), "RAY_ADDRESS": address},
        cwd=Path.cwd(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    try:
        assert process.stdin is not None
        process.stdin.write(spec.model_dump_json(exclude_unset=True))
        process.stdin.close()
        yield process
    finally:
        kill_group(process.pid)
        process.wait()
