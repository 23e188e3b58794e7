"""What would make every rank of a job fail, found before anything is started."""

from __future__ import annotations

from collections.abc import Mapping

import mccl_core
from mccl_core.settings import SettingsError
from mccl_ray import secret


def check(environ: Mapping[str, str]) -> bytes:
    """Returns the job's secret once the backend and the secret are in order; imports torch.

    Raises:
        ValueError: the user's secret cannot be used, or another package has registered `mccl`.
    """
    key = secret.obtain(environ)
    try:
        mccl_core.require_backend()
    except RuntimeError as error:
        raise SettingsError(str(error)) from error
    return key
