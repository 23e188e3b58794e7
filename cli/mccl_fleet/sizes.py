"""Sizes as people write them: 65536, 64KiB, 25MB."""

from __future__ import annotations

import re

_FACTORS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_nbytes(text: str, *, option: str) -> int:
    """Bytes of "64KiB", "25MB" or "65536".

    Raises:
        ValueError: it is no size of at least one byte; the text names the option.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    factor = _FACTORS.get(match[2].upper()) if match else None
    nbytes = round(float(match[1]) * factor) if match and factor else 0
    if nbytes < 1:
        raise ValueError(f"{option}: {text!r} is no size; give bytes as in 65536, 64KiB or 25MB")
    return nbytes


def nbytes_name(nbytes: int) -> str:
    """The shortest exact name: 65536 → "64 KiB", 25000000 → "25 MB", 1001 → "1001 B"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"
