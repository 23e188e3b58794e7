"""Writes events to the fleet worker."""

import os

from mccl_lightning.contract import Event, encode


class EventWriter:
    """Writes to an inherited pipe; to nothing where there is none.

    A write blocks while the pipe is full, that is, while the worker reads nothing for hundreds of events.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def write(self, event: Event) -> None:
        """Hands over one event.

        Raises:
            BrokenPipeError: the worker has gone, and with it whoever wanted this training.
        """
        if self._fd is None:
            return
        line = encode(event)
        while line:
            line = line[os.write(self._fd, line) :]
