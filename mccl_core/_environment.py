"""What there is to say about a process's variables, each once."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping

from mccl_core.config import CoreConfig
from mccl_core.variables import ALIASES, FLEET, JOB_VARIABLES, REPLACED

log = logging.getLogger("mccl")

PREFIX = "MCCL_"
KNOWN = frozenset({f"{PREFIX}{name.upper()}" for name in CoreConfig.model_fields} | set(ALIASES))
_BY_SHORT_NAME = {name.removeprefix(PREFIX): name for name in sorted(KNOWN | set(REPLACED))}
_said: set[str] = set()


def remarks(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields (variable, what to say of it) for those that do nothing."""
    for name in sorted(environ):
        fleets = name == FLEET or name.startswith(f"{FLEET}_")
        if not name.startswith(PREFIX) or fleets or name in KNOWN or name in JOB_VARIABLES:
            continue
        if name in REPLACED:
            yield name, f"{name} has no effect: {REPLACED[name]}"
            continue
        close = difflib.get_close_matches(name.removeprefix(PREFIX), _BY_SHORT_NAME, n=1)
        remedy = (
            f"did you mean {_BY_SHORT_NAME[close[0]]}?" if close else "docs/environment.md lists those that there are"
        )
        yield name, f"{name} has no effect: there is no such variable; {remedy}"


def remark_once(environ: Mapping[str, str]) -> None:
    """Logs a warning for each variable that does nothing, the first time in this process."""
    for name, text in remarks(environ):
        if name not in _said:
            _said.add(name)
            log.warning("mccl: %s", text)
