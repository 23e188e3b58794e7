"""The job's secret: where it comes from, and the 0600 file by which a worker hands it to the script."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from mccl_core.settings import SettingsError
from mccl_ray.environ import SECRET, SECRET_FILE

SECRET_NBYTES = 32


def obtain(environ: Mapping[str, str]) -> str:
    """The user's secret (MCCL_SECRET_FILE, then MCCL_SECRET), or a new one of 64 hexadecimal digits.

    Raises:
        SettingsError: the file is missing, empty, or readable by others than its owner.
    """
    if environ.get(SECRET_FILE):
        return read(Path(environ[SECRET_FILE]))
    return environ.get(SECRET) or secrets.token_hex(SECRET_NBYTES)


def read(path: Path) -> str:
    """The secret in `path`, without surrounding white space.

    Raises:
        SettingsError: the file is missing, empty, or readable by others than its owner.
    """
    source = f"{SECRET_FILE}: {str(path)!r} (environment {SECRET_FILE})"
    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise SettingsError(
                f"{source} may be read by others (mode {stat.S_IMODE(mode):04o}); chmod 600 it"
            )
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise SettingsError(f"{source} cannot be read: {reason}; correct the path or unset it") from error
    if not text:
        raise SettingsError(f"{source} is empty; write the secret into it")
    return text


def write(path: Path, secret: str) -> None:
    """Creates `path`, readable by its owner only."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secret)
