"""The job's secret, as the driver obtains it: the user's, or a new one for each job."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from mccl_core.config import CoreConfig
from mccl_ray.environ import SECRET, SECRET_FILE

_SECRET_NBYTES = 32


def obtain(environ: Mapping[str, str]) -> bytes:
    """The user's secret (MCCL_SECRET_FILE or MCCL_SECRET), or a new one of 64 hexadecimal digits.

    Raises:
        ValueError: the file is missing, too short, or readable by others than its owner.
    """
    given = {name: environ[name] for name in (SECRET, SECRET_FILE) if environ.get(name)}
    return CoreConfig.from_environment(given).read_secret() or secrets.token_hex(_SECRET_NBYTES).encode()
