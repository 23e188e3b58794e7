"""One host: a network namespace with one link."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from netns.names import FOLDER
from netns.tools import run_tool

INTERFACE = "eth0"
CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000  # linux/sched.h; Python has os.setns from 3.12 on only

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Host:
    """A host. Its interface is eth0, its name that of the machine for whatever runs in it."""

    name: str
    namespace: str
    address: str
    port: str  # the switch's end of its link

    def enter(self) -> None:
        """Moves the calling process, which must have one thread, into this host for good.

        Raises:
            OSError: the namespace is gone, or this process may not enter it.
        """
        descriptor = os.open(FOLDER / self.namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.setns(descriptor, CLONE_NEWNET))
        finally:
            os.close(descriptor)
        _check(_libc.unshare(CLONE_NEWUTS))
        socket.sethostname(self.name)

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command in this host; signals reach the command itself. `options` are subprocess.Popen's."""
        return subprocess.Popen(command, preexec_fn=self.enter, **options)

    def run(self, command: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60) -> str:
        """Runs a command in this host to its end; returns what it printed.

        Raises:
            NetworkError: it ended with another status than 0, or was killed after `timeout_s` seconds.
        """
        return run_tool(*command, stdin=stdin, timeout_s=timeout_s, enter=self.enter)

    def processes(self) -> list[int]:
        """The ids of the processes in this host."""
        return [int(pid) for pid in run_tool("ip", "netns", "pids", self.namespace).split()]

    def sent_nbytes(self) -> int:
        """Bytes that have left this host since it was made, headers included."""
        (link,) = json.loads(run_tool("ip", "-n", self.namespace, "-s", "-j", "link", "show", INTERFACE))
        return int(link["stats64"]["tx"]["bytes"])


def _check(status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
