"""What namespaces need of the machine, and how to get it."""

from __future__ import annotations

import os
import shutil
import sys

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "iperf3": "iperf3"}


def unmet_requirement(tools: tuple[str, ...] = tuple(PACKAGES)) -> str | None:
    """Returns why namespaces cannot be used here and what to do about it, or None if nothing is missing.

    Args:
        tools: programs that must be on PATH.
    """
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces need root: run as root, or with sudo"
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        packages = sorted({PACKAGES[tool] for tool in missing})
        return f"not on PATH: {', '.join(missing)}; install the Debian packages {' '.join(packages)}"
    return None
