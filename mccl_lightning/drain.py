"""Agrees on the step at which all ranks checkpoint because one of their hosts is about to leave."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class DrainWatch:
    """Watches for a drain file on every rank's host.

    Ranks see a file at different times. So at each step boundary they reduce "is mine there?", 4 bytes that
    travel during the next step, and all read the same answer one step later.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._asked: tuple[torch.Tensor, Any] | None = None

    def reached(self, device: torch.device) -> bool:
        """Whether to checkpoint now; true at most once. Every rank calls this at every step boundary.

        Blocks until the question of the step before is answered, which the step itself has made likely.

        Raises:
            torch.distributed.DistBackendError: a rank has died.
        """
        if self._path is None:
            return False
        if self._answer():
            self._path = None
            return True
        # NCCL reduces on its device only; the others take a CPU tensor, which costs a GPU nothing.
        flag = torch.tensor([self._path.exists()], dtype=torch.int32, device=_reducing(device))
        self._asked = flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True)
        return False

    def close(self) -> None:
        """Waits for a question that is still out; every rank calls this when its training ends."""
        self._answer()

    def _answer(self) -> bool:
        if self._asked is None:
            return False
        flag, work = self._asked
        self._asked = None
        work.wait()
        return bool(flag.item())


def _reducing(device: torch.device) -> torch.device:
    return device if device.type == "cuda" else torch.device("cpu")
