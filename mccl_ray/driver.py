"""The program that runs a job beside the fleet's head: `python -m mccl_ray.driver RUN JOB`.

JOB is a `JobSpec` as JSON, or "-" where that comes by stdin.

Ray's job submission starts it on a remote head, the command line starts it beside an embedded fleet. It
prints events (`mccl_ray.events.to_line`) and nothing else, and exits with a status of `mccl_ray.exitcodes`.
"""

from __future__ import annotations

import sys

import ray

from mccl_ray import environ, exitcodes, preflight
from mccl_ray.config import JobSpec
from mccl_ray.events import OUTPUT, RESULT, Event, to_line
from mccl_ray.fleet_size import NotEnoughMacs
from mccl_ray.journal import FAILED, FINISHED
from mccl_ray.trainer import run_job


def emit(event: Event) -> None:
    """Prints an event: a line of the script as it is, anything else as an event's line."""
    print(event["text"] if event["event"] == OUTPUT else to_line(event), flush=True)


def main(argv: list[str]) -> int:
    """Runs the job that the argument describes, under the name `RUN`; returns the exit status."""
    run, job = argv
    try:
        spec = JobSpec.model_validate_json(sys.stdin.read() if job == "-" else job)
        key = preflight.check(environ.snapshot())
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        result = run_job(spec, run=run, secret=key, emit=emit)
    except (ValueError, NotEnoughMacs, OSError) as error:
        code = exitcodes.NOT_ENOUGH_MACS if isinstance(error, NotEnoughMacs) else exitcodes.BAD_INPUT
        emit({"event": RESULT, "run": run, "status": FAILED, "error": str(error), "exit_code": code})
        return code
    return exitcodes.OK if result["status"] == FINISHED else exitcodes.FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
