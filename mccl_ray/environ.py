"""The one place where this package reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SECRET = "MCCL_SECRET"
SECRET_FILE = "MCCL_SECRET_FILE"
HOST_NAME = "MCCL_HOST_NAME"


def snapshot() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def set_for_group(*, secret_file: Path, host: str) -> None:
    """Tells the core, which reads this process's environment as it makes a group, secret and name."""
    os.environ.pop(SECRET, None)
    os.environ[SECRET_FILE] = str(secret_file)
    os.environ.setdefault(HOST_NAME, host)


def for_script(environ: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """The script's environment: what the worker was given, without Ray's limit on threads, plus `added`.

    Ray sets OMP_NUM_THREADS=1 in a worker that asks for no CPU, yet the script has the whole Mac.
    """
    kept = {name: value for name, value in environ.items() if name not in (SECRET, "OMP_NUM_THREADS")}
    return {**kept, "PYTHONUNBUFFERED": "1", **added}


def for_ray(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a Ray daemon or driver that this package starts.

    A Mac may join a cluster only where Ray is told so; a busy node is stopped at once instead of after 30 s;
    workers run at normal priority, where Ray's niceness of 15 lets any other load starve a step of all ranks.
    """
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_worker_niceness": "0",
        **environ,
    }


def with_ray_token(environ: Mapping[str, str], token: Path) -> dict[str, str]:
    """The environment of a Ray process that speaks only to holders of the token in this file.

    A user who has set RAY_AUTH_MODE, to whatever, has decided otherwise.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), **environ}


def for_local_driver(environ: Mapping[str, str]) -> dict[str, str]:
    """The same beside a fleet that nobody drains: no actor that watches for that."""
    return {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0", **for_driver(environ)}


def for_driver(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that Ray Train reads in the driver; what the user has set wins.

    The health check's interval bounds how long a dead worker goes unreported.
    """
    return {
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "RAY_TRAIN_METRICS_ENABLED": "0",
        **for_ray(environ),
    }
