"""`mccl-fleet`: submits training jobs to a fleet of Macs and watches them.

Exit statuses (mccl_ray.exitcodes): 0 done (of `submit`: training finished), 1 training failed or was
cancelled, 2 bad input, 3 no reachable head, 4 not enough Macs, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

import typer

from mccl_fleet.commands import cancel, config_show, doctor, logs, nodes, plan, status, submit, tune, version
from mccl_ray import exitcodes

app = typer.Typer(
    help="Submits training jobs to a fleet of Macs and watches them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Shows the configuration.", no_args_is_help=True)
app.command()(submit.submit)
app.command()(status.status)
app.command()(logs.logs)
app.command()(cancel.cancel)
app.command()(nodes.nodes)
app.command()(plan.plan)
app.command()(tune.tune)
app.command()(doctor.doctor)
app.command()(version.version)
config_app.command("show")(config_show.config_show)
app.add_typer(config_app, name="config")


def main() -> None:
    """Runs the command line and exits with its status; Typer makes 130 of Ctrl-C, 1 of a closed pipe."""
    signal.signal(signal.SIGTERM, _terminate)
    app()


def _terminate(signum: int, frame: FrameType | None) -> None:
    """Ends the program as Ctrl-C does, so that whatever it has started is stopped."""
    sys.exit(exitcodes.TERMINATED)


if __name__ == "__main__":
    main()
