"""What a report says of the machine: enough to compare reports, nothing that tells whose it is."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

import mccl_core
from mccl_core.selftest.report import Machine


def describe() -> Machine:
    """Reads the facts from the system."""
    mac = platform.mac_ver()[0]
    return Machine(
        system=f"macOS {mac}" if mac else f"{platform.system()} {platform.release()}",
        processor=_processor(),
        core_count=os.cpu_count() or 1,
        memory_nbytes=_memory_nbytes(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        mccl_fleet=mccl_core.__version__,
        mps_available=torch.backends.mps.is_available(),
    )


def _processor() -> str:
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_nbytes() -> int:
    with contextlib.suppress(ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0
