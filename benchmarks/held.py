"""What this process holds: memory, threads, descriptors. Linux: reads /proc."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path
from typing import TypedDict

PROC = Path("/proc/self")
_looking = threading.Lock()  # else one thread would count the file that another one reads


class Held(TypedDict):
    """What the system says of a process at one time."""

    rss_nbytes: int
    """All its memory that is in RAM."""
    pss_nbytes: int
    """The same, where of memory that several processes share each has its part."""
    threads: int
    descriptors: int


def held_now() -> Held:
    """Of this process."""
    with _looking:
        lines = (PROC / "smaps_rollup").read_text().splitlines()[1:]
        memory = {name: int(value.split()[0]) * 1024 for name, value in (line.split(":") for line in lines)}
        return {
            "rss_nbytes": memory["Rss"],
            "pss_nbytes": memory["Pss"],
            "threads": len(list((PROC / "task").iterdir())),
            "descriptors": len(list((PROC / "fd").iterdir())),
        }


def held_after_trim() -> Held:
    """Of this process, without what Python and the C library keep to themselves of memory that was freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return held_now()
