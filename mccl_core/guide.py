"""The names that guides to training on two Macs use: `import mccl` serves this module, after `import torch`.

    import torch
    import mccl

    mccl.apply_thunderbolt_production_defaults()
    mccl.init()                 # under torchrun; from here on torch.distributed and DDP as usual
    ...
    mccl.log_metrics()

Where a package called mccl is installed, `import mccl` is that package; this module is then `mccl_core.guide`.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mccl_core import __version__, require_backend
from mccl_core._runtime import current_runtime
from mccl_core.config import MIB, choose
from mccl_core.metrics import get_metrics, log_metrics, reset_metrics

__all__ = [
    "__version__",
    "apply_thunderbolt_production_defaults",
    "get_metrics",
    "init",
    "log_metrics",
    "reset_metrics",
]

log = logging.getLogger("mccl")

THUNDERBOLT: dict[str, Any] = {
    "segment_nbytes": 2 * MIB,  # as long on the wire as 1 MiB at 10 Gbit/s: what goes first waits no longer
    "credit_nbytes": 8 * MIB,  # lasts as long until a late peer's bytes stop flowing
    "socket_buffer_nbytes": 4 * MIB,  # the system's begin small and have to grow first
}
"""Fields of `CoreConfig` for a link of 20 Gbit/s and more, by what they are on 10 Gbit/s. Not measured on a Mac."""


def init(*, timeout_s: float | None = None, **settings: Any) -> None:
    """Makes the default process group on the backend `mccl`, as `torch.distributed.init_process_group("mccl")` does.

    Rank, world and the address of rank 0 come from torchrun's variables. Blocks until all ranks are there and linked.

    Args:
        timeout_s: seconds after which an op that has not ended fails on every rank; by default MCCL_OP_TIMEOUT_MS,
            then torch's 30 minutes.
        settings: fields of `CoreConfig`, as `allreduce_algo="ring"`; they win over MCCL_* variables. Give all ranks
            the same.

    Raises:
        SettingsError: a setting is unknown or out of range; the text names it and what is possible.
        RuntimeError: another package has registered `mccl`, or there has been a group already, to which settings
            would come too late.
        ValueError: the script was not started with torchrun, or there is a default group.
        DistBackendError: a rank is missing, unreachable or has another secret; the text says which and what to do.
    """
    require_backend()
    if settings:
        _require_no_group("settings")
        choose(settings, over_environment=True)
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    try:
        dist.init_process_group("mccl", timeout=timeout)
    except ValueError as error:
        if "environment variable" not in str(error):
            raise
        raise ValueError(f"{error}; start this script with torchrun on every machine") from error


def apply_thunderbolt_production_defaults() -> dict[str, Any]:
    """Chooses settings for two Macs on a Thunderbolt cable, for the groups that this process makes from now on.

    Call it on both, before the first group; variables that you have set win. It cannot know the bridge's address:
    torchrun's --master_addr must be the first Mac's on the bridge, so that traffic takes the cable. Nor does it know
    how fast the link is: `python -m mccl_core.tune` measures that, and MCCL_LINK_PROFILE names the result.

    Returns:
        The fields of `CoreConfig` that were set, as the log says too.

    Raises:
        RuntimeError: there has been a group already.
        SettingsError: an MCCL_* variable cannot be used.
    """
    _require_no_group("apply_thunderbolt_production_defaults()")
    chosen = choose(THUNDERBOLT, over_environment=False)
    told = ", ".join(f"{name}={value}" for name, value in chosen.items())
    log.warning("mccl: for Thunderbolt: %s", told or "nothing to set, MCCL_* variables have it all")
    return chosen


def _require_no_group(what: str) -> None:
    if current_runtime() is not None:
        raise RuntimeError(f"mccl: {what} came after the first process group was made, and has to come before it")
