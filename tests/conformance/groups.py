"""Which backend stands behind the name that the suite asks for.

The suite opens tests by the backend's name, and most of those that CPU tensors can run by the name gloo. So there are
two modes. `backend`: the name is mccl, as a user writes it. `impersonate`: the name is gloo, and torch's Python builds
our group where it would build Gloo's. In both, Gloo itself can stand behind the name, for comparison.
"""

from __future__ import annotations

from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from mccl_core._backend import create
from mccl_core._C import ProcessGroupMCCL

Mode = Literal["backend", "impersonate"]
Subject = Literal["mccl", "gloo"]
NAMES: dict[Mode, str] = {"backend": "mccl", "impersonate": "gloo"}


def install(mode: Mode, subject: Subject) -> None:
    """Puts `subject` behind the name of `mode`, in this process and those forked from it."""
    if mode == "backend" and subject == "gloo":
        dist.Backend._plugins["MCCL"] = dist.Backend._BackendPlugin(_gloo, True)
    if mode == "impersonate" and subject == "mccl":
        distributed_c10d.ProcessGroupGloo = _Impostor
        _answer_for_gloos_threads()


def _answer_for_gloos_threads() -> None:
    """Puts the number of Gloo's threads into DDP's log: torch reads it out of what it takes for Gloo's object.

    One test asks for it; all else in that log is ours, and is tested.
    """
    logged = DistributedDataParallel._get_ddp_logging_data

    def with_threads(module: DistributedDataParallel) -> dict[str, Any]:
        data = logged(module)
        return data | {"gloo_num_threads": 2} if data.get("backend_name") == "gloo" else data

    DistributedDataParallel._get_ddp_logging_data = with_threads


def _gloo(options: Any, backend_options: Any) -> Any:
    group = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    group._set_sequence_number_for_group()
    return group


class _Whole(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ProcessGroupMCCL)


class _Impostor(metaclass=_Whole):
    """Called like `ProcessGroupGloo`, it builds our group; `isinstance` is true of that."""

    def __new__(cls, store: Any, rank: int, size: int, timeout: Any) -> Any:
        options = distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, timeout
        return create(options, None, profile_name=NAMES["impersonate"])
