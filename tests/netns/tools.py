"""Runs ip, tc, nft and others to their end."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable


class NetworkError(RuntimeError):
    """A tool refused or took too long; the text holds its command and its answer."""


def run_tool(
    *command: str, stdin: str | None = None, timeout_s: float = 60, enter: Callable[[], None] | None = None
) -> str:
    """Runs a tool to its end; returns what it printed.

    Args:
        enter: called in the new process before the tool starts.

    Raises:
        NetworkError: it ended with another status than 0, or was killed after `timeout_s` seconds.
    """
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            preexec_fn=enter,
            start_new_session=True,  # an interrupt from the keyboard cannot break off a clean-up
        )
    except subprocess.TimeoutExpired as error:
        raise NetworkError(f"{shlex.join(command)}: did not end within {timeout_s:g} s") from error
    if done.returncode != 0:
        raise NetworkError(f"{shlex.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout
