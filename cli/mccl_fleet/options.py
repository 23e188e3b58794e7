"""Options that several commands share, and the way errors become one message and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from requests.exceptions import RequestException

from mccl_core.settings import SettingsError
from mccl_fleet import config
from mccl_ray import environ, exitcodes
from mccl_ray.fleet_size import NotEnoughMacs
from mccl_ray.remote import NoHead

Address = Annotated[
    str | None,
    typer.Option(help="The head's job server, host:port. Default: MCCL_FLEET_ADDRESS, then the profile."),
]
Profile = Annotated[
    Path | None,
    typer.Option(help="A profile. Default: MCCL_FLEET_PROFILE, then ~/.config/mccl-fleet/profile.yaml."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one value a line, and nothing else.")]


def fail(message: str, status: int) -> typer.Exit:
    """Prints `message` to stderr; raise what this returns."""
    print(f"error: {message}", file=sys.stderr)
    return typer.Exit(status)


@contextmanager
def one_message() -> Iterator[None]:
    """Turns an error that the user can mend into its message and its exit status."""
    try:
        yield
    except NotEnoughMacs as error:
        raise fail(str(error), exitcodes.NOT_ENOUGH_MACS) from None
    except (SettingsError, ValueError) as error:
        raise fail(str(error), exitcodes.BAD_INPUT) from None


@contextmanager
def head_errors() -> Iterator[None]:
    """The same for the errors of a head."""
    try:
        yield
    except (NoHead, RequestException) as error:
        raise fail(str(error), exitcodes.NO_HEAD) from None


def head_address(address: str | None, profile: Path | None) -> str:
    """The address of the head that a command needs.

    Raises:
        typer.Exit: none is configured.
    """
    client = config.load(environ=environ.snapshot(), profile=profile, arguments={"address": address}).values
    if client.address is None:
        raise fail(
            "no head is configured; pass --address, set MCCL_FLEET_ADDRESS or write a profile "
            "(jobs of a fleet on this machine end with their `submit`)",
            exitcodes.NO_HEAD,
        )
    return client.address
