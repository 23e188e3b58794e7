"""N processes forked from this one, each of which runs a function and reports how that ended.

The forking process holds torch but no engine, so that a rank costs a fork and not an import. None is left behind.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from types import TracebackType
from typing import Any, Self


@dataclass
class Outcome:
    """How one rank ended: its result, or the error that it raised, or the signal that ended it."""

    result: Any = None
    error: BaseException | None = None
    text: str = ""
    exit_code: int | None = None


class RankProcesses:
    """`body(rank)` in `world` processes, from entering to leaving the context.

    With `hold` a rank that has reported stays, with its sockets open, until `let_go`; without it ends at once.
    """

    def __init__(self, world: int, body: Callable[[int], Any], *, hold: bool = False) -> None:
        self.world = world
        self._body = body
        self._hold = hold
        self._processes: list[ForkProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("fork")
        held, holder = context.Pipe(duplex=False)
        self._holder = holder
        try:
            for rank in range(self.world):
                receiver, sender = context.Pipe(duplex=False)
                arguments = (rank, self._body, sender, held if self._hold else None, holder)
                process = context.Process(target=_child, args=arguments, daemon=True)
                process.start()
                sender.close()
                self._processes.append(process)
                self._pipes.append(receiver)
        except BaseException:
            self.close()
            raise
        finally:
            held.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to a rank's process, which must not have been waited for."""
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def outcomes(self, timeout_s: float, awaited: Collection[int] | None = None) -> list[Outcome]:
        """Waits until all ranks, or the awaited ones, have reported or died; once.

        A rank that has not by then "did not end in time".
        """
        outcomes = [Outcome(text="did not end in time") for _ in range(self.world)]
        pending = {self._pipes[rank]: rank for rank in (range(self.world) if awaited is None else awaited)}
        until = time.monotonic() + timeout_s
        while pending and time.monotonic() < until:
            for pipe in wait(list(pending), timeout=max(0.0, until - time.monotonic())):
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._processes[rank].join(10)
                    code = self._processes[rank].exitcode
                    outcomes[rank] = Outcome(text=f"died with exit code {code}", exit_code=code)
        return outcomes

    def let_go(self, timeout_s: float) -> None:
        """Lets held ranks leave and waits until all have, `timeout_s` at most."""
        self._holder.close()
        until = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Kills what is left."""
        self._holder.close()
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()


def _child(
    rank: int, body: Callable[[int], Any], pipe: Connection, held: Connection | None, holder: Connection
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    holder.close()  # so that `held` ends when the caller closes its own, or dies
    outcome = Outcome()
    try:
        outcome.result = body(rank)
    except BaseException as error:
        outcome.text = traceback.format_exc()
        outcome.error = error
    try:
        payload = pickle.dumps(outcome)
    except Exception:  # an error type that cannot be pickled: its text is enough
        outcome.error = RuntimeError(str(outcome.error))
        payload = pickle.dumps(outcome)
    pipe.send_bytes(payload)
    if held is not None:
        held.poll(None)
    sys.stdout.flush()
    sys.stderr.flush()
    # Like the end of a script, without running pytest's own exit handlers.
    runtime = sys.modules.get("mccl_core._runtime")
    if runtime is not None:
        runtime._stop()
    os._exit(0)
