"""DDP_BUCKET_MB for an unmodified script: torch has no default that could be set."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch.nn.parallel import DistributedDataParallel

_make = DistributedDataParallel.__init__
_signature = inspect.signature(_make)
_bucket_mb = 0.0


def use_buckets_of(bucket_mb: float) -> None:
    """From now on DistributedDataParallel uses buckets of `bucket_mb` MiB wherever it is given no size."""
    global _bucket_mb
    _bucket_mb = bucket_mb
    DistributedDataParallel.__init__ = _make_with_buckets


@functools.wraps(_make)
def _make_with_buckets(*args: Any, **kwargs: Any) -> None:
    call = _signature.bind(*args, **kwargs)
    if all(call.arguments.get(name) is None for name in ("bucket_cap_mb", "bucket_cap_mb_list")):
        call.arguments["bucket_cap_mb"] = _bucket_mb
    _make(*call.args, **call.kwargs)
