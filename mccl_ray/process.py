"""A child process with a log, in a session of its own, that cannot outlive this process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mccl_ray import guard

TAIL_LINES = 20
MAX_LINE_CHARS = 4096
_OUTPUT_GRACE_S = 1.0


def guarded(command: Sequence[str], *, cleanup: Path | None = None, grace_s: float = 0) -> list[str]:
    """`command` under the guard: it dies with the calling thread, and `cleanup` is deleted thereafter.

    With a grace it dies with the calling process, and may stop its own helpers for so long. Start it with
    `start_new_session=True`.
    """
    directory = str(cleanup) if cleanup else ""
    options = [str(os.getpid()), directory, str(grace_s)]
    return [sys.executable, "-I", "-S", guard.__file__, *options, *command]


def delete_after_this_process(folder: Path) -> None:
    """Has a watchdog delete `folder` when this process ends in whatever way; returns once it watches."""
    subprocess.run(guarded([], cleanup=folder, grace_s=1), check=True, start_new_session=True)


def kill_group(pid: int) -> None:
    """SIGKILL to a child's whole process group; a group that is already gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def describe_exit(returncode: int) -> str:
    """A return code in words, as in "exit code 3" or "killed by SIGKILL"."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def write_private(path: Path, content: bytes) -> None:
    """Creates `path`, readable by its owner only."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


class LoggedProcess:
    """A guarded child whose output goes, line by line, to a log file and to `on_line`.

    `on_exit(returncode)` is called on a thread of this object as soon as the child has ended; its group is
    dead by then.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        environ: Mapping[str, str],
        log_path: Path,
        pass_fds: Sequence[int] = (),
        cleanup: Path | None = None,
        on_line: Callable[[str], None] = lambda line: None,
        on_exit: Callable[[int], None] = lambda returncode: None,
    ) -> None:
        self._command = guarded(command, cleanup=cleanup)
        self._cwd = cwd
        self._environ = environ
        self._log_path = log_path
        self._pass_fds = pass_fds
        self._on_line = on_line
        self._on_exit = on_exit
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def start(self) -> None:
        """Starts the child. It is killed when the calling thread ends, so that thread must outlive it.

        Raises:
            OSError: the log file or the working directory cannot be used.
        """
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = self._log_path.open("a", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            self._command,
            cwd=self._cwd,
            env=dict(self._environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=tuple(self._pass_fds),
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._output = threading.Thread(target=self._copy_output, name=f"output of {self.pid}", daemon=True)
        self._exit = threading.Thread(target=self._await_exit, name=f"exit of {self.pid}", daemon=True)
        self._output.start()
        self._exit.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tail(self) -> list[str]:
        """The last lines of the output."""
        return list(self._tail)

    def kill(self) -> None:
        """SIGKILL to the child's process group."""
        kill_group(self.pid)

    def wait(self) -> int:
        """Blocks until the child has ended and its output is in the log; returns its return code."""
        self._exit.join()
        return self._process.returncode

    def _copy_output(self) -> None:
        assert self._process.stdout is not None
        with self._log, self._process.stdout as stdout:
            while line := stdout.readline(MAX_LINE_CHARS):
                self._log.write(line)
                self._log.flush()
                self._tail.append(line.rstrip("\n"))
                self._on_line(line.rstrip("\n"))

    def _await_exit(self) -> None:
        returncode = self._process.wait()
        self.kill()
        # A descendant that left the group may hold the pipe open: what it prints later is not waited for.
        self._output.join(_OUTPUT_GRACE_S)
        self._on_exit(returncode)
