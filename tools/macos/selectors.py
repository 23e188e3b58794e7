"""Methods of Objective-C are called by name, which no compiler checks: each name must be one that Apple declares."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_CALL = re.compile(r"\bsend<[^;()]*>\(")
_NAMED_CALL = re.compile(r'\bsend<[^;()]*>\(\s*(?:\w+|\w+\(\)),\s*"([^"]+)"')
_CLASS = re.compile(r'\bobjc_getClass\("(\w+)"\)')
_DECLARED = re.compile(r'_(?:MTL|NS)_PRIVATE_DEF_SEL\(\s*\w+,\s*"([^"]+)"')
_DECLARED_CLASS = re.compile(r"_(?:MTL|NS)_PRIVATE_DEF_CLS\(\s*(\w+)\s*\)")


def faults(sources: Iterable[Path], metal_cpp: Path) -> list[str]:
    """What the sources call that metal-cpp does not declare, one line each.

    Raises:
        ValueError: a message's name could not be read, or there is no message at all: nothing would be checked.
    """
    headers = [header.read_text() for header in metal_cpp.rglob("*.hpp")]
    methods = {name for header in headers for name in _DECLARED.findall(header)}
    classes = {name for header in headers for name in _DECLARED_CLASS.findall(header)}
    found, count = [], 0
    for path in sources:
        source = path.read_text()
        called = _NAMED_CALL.findall(source)
        if len(called) != len(_CALL.findall(source)):
            raise ValueError(
                f'{path.name}: write messages as send<Result>(object, "name", ...), so that all are checked'
            )
        count += len(called)
        found += [f"{path.name}: metal-cpp knows no method {name}" for name in called if name not in methods]
        found += [
            f"{path.name}: metal-cpp knows no class {name}" for name in _CLASS.findall(source) if name not in classes
        ]
    if count == 0:
        raise ValueError("no Objective-C message was found in the sources")
    return found
