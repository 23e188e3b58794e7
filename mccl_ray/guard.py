"""Starts a program that cannot outlive its starter: `python -I guard.py PARENT_PID CLEANUP_DIR GRACE_S CMD…`.

The program gets a session of its own from the caller. A watchdog, detached from both, sleeps in the kernel
until the parent or the program ends, then kills the program's process group, so that its helpers go too;
once the parent has ended, it deletes CLEANUP_DIR ("" for none). GRACE_S > 0 is for a program that stops
helpers in groups of their own, as a Ray node does: it gets SIGTERM and so many seconds first. With 0, on
Linux, the kernel also kills it together with the thread that started it. Without CMD
there is only the folder. Only the standard library is used: this file runs alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys

_PR_SET_PDEATHSIG = 1
_MAX_DESCRIPTORS = 65536


def wait_for_exit_of(pids: set[int], timeout_s: float | None = None) -> set[int]:
    """Blocks until at least one of `pids` has ended or the time is over; returns those that have ended."""
    if hasattr(os, "pidfd_open"):
        return _wait_with_pidfd(pids, timeout_s)
    return _wait_with_kqueue(pids, timeout_s)


def _wait_with_pidfd(pids: set[int], timeout_s: float | None) -> set[int]:
    poller = select.poll()
    descriptors: dict[int, int] = {}
    gone = set()
    for pid in pids:
        try:
            descriptors[os.pidfd_open(pid)] = pid
        except ProcessLookupError:
            gone.add(pid)
    if not gone:
        for descriptor in descriptors:
            poller.register(descriptor, select.POLLIN)
        timeout_ms = None if timeout_s is None else timeout_s * 1000
        gone = {descriptors[descriptor] for descriptor, _ in poller.poll(timeout_ms)}
    for descriptor in descriptors:
        os.close(descriptor)
    return gone


def _wait_with_kqueue(pids: set[int], timeout_s: float | None) -> set[int]:  # pragma: no cover (macOS)
    queue = select.kqueue()  # type: ignore[attr-defined,unused-ignore]
    gone = set()
    for pid in pids:
        event = select.kevent(  # type: ignore[attr-defined,unused-ignore]
            pid,
            filter=select.KQ_FILTER_PROC,  # type: ignore[attr-defined,unused-ignore]
            flags=select.KQ_EV_ADD,  # type: ignore[attr-defined,unused-ignore]
            fflags=select.KQ_NOTE_EXIT,  # type: ignore[attr-defined,unused-ignore]
        )
        try:
            queue.control([event], 0)
        except ProcessLookupError:
            gone.add(pid)
    if not gone:
        gone = {event.ident for event in queue.control(None, len(pids), timeout_s)}
    queue.close()
    return gone


def watch(parent: int, program: int, cleanup: str, grace_s: float) -> None:
    """The watchdog: returns once the program's group is dead and the folder, if any, is deleted.

    `program` is `parent` where there is a folder to delete and no program.
    """
    gone = wait_for_exit_of({parent, program})
    if program == parent:
        shutil.rmtree(cleanup, ignore_errors=True)
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if grace_s and program not in gone:
            os.kill(program, signal.SIGTERM)
            wait_for_exit_of({program}, grace_s)
        os.killpg(program, signal.SIGKILL)
    if cleanup:
        if parent not in gone:
            wait_for_exit_of({parent})
        shutil.rmtree(cleanup, ignore_errors=True)


def main(argv: list[str]) -> None:
    """Becomes the program, after detaching a watchdog."""
    parent, cleanup, grace_s, command = int(argv[0]), argv[1], float(argv[2]), argv[3:]
    if sys.platform == "linux" and not grace_s:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    program = os.getpid()
    first = os.fork()
    if first == 0:
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            os.closerange(3, _MAX_DESCRIPTORS)
            watch(parent, program if command else parent, cleanup, grace_s)
        os._exit(0)
    os.waitpid(first, 0)
    if command:
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
