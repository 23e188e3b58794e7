"""Whose namespace is whose: each name holds its owner, so that leftovers of a dead one are found and removed."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
from pathlib import Path

from netns.tools import NetworkError, run_tool

FOLDER = Path("/run/netns")  # where `ip netns` keeps them
PREFIX = "mcclnet"
NAME = re.compile(rf"{PREFIX}-(?P<pid>\d+)-(?P<born>\d+)-\d+-\w+")

_serials = itertools.count()


def name_prefix() -> str:
    """A prefix for the namespaces of one more network of this process."""
    return f"{PREFIX}-{os.getpid()}-{_born(os.getpid())}-{next(_serials)}"


def sweep() -> list[str]:
    """Removes the namespaces whose owner is gone, with all processes in them; returns their names."""
    entries = sorted(FOLDER.iterdir()) if FOLDER.exists() else []
    owned = [(entry.name, match) for entry in entries if (match := NAME.fullmatch(entry.name))]
    dead = [name for name, match in owned if _born(int(match["pid"])) != int(match["born"])]
    for name in dead:
        with contextlib.suppress(NetworkError):  # another sweep was first
            remove(name)
    return dead


def remove(name: str) -> None:
    """Kills every process in a namespace (except the caller) and removes it.

    Raises:
        NetworkError: there is no such namespace.
    """
    for pid in map(int, run_tool("ip", "netns", "pids", name).split()):
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    run_tool("ip", "netns", "delete", name)


def _born(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with it a pid that is used again is told apart."""
    try:
        # The command's name, in parentheses, may hold spaces.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None
