"""Reads what matters of a 64-bit Mach-O library: for which machine it is, and where each symbol is to come from."""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

_MAGIC_64 = 0xFEEDFACF
_CPU_ARM64 = 0x0100000C
_FILE_TYPES = {6: "DYLIB", 8: "BUNDLE"}
_LOAD_DYLIB = (0xC, 0x80000018, 0x8000001F)  # plain, weak, re-exported
_SYMTAB, _BUILD_VERSION = 0x2, 0x32
_PLATFORM_MACOS = 1
FLAT = "any library that is loaded"  # no library is named: looked up by name alone at run time
_PYTHONS = re.compile(r"__?Py")


@dataclass
class Library:
    """A dynamic library. Versions are (major, minor); symbols as the linker names them, with their underscore."""

    is_arm64: bool
    file_type: str
    is_macos: bool = False
    minimum_version: tuple[int, int] | None = None
    dylibs: list[str] = field(default_factory=list)
    undefined: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # by dylib, or FLAT
    exported: list[str] = field(default_factory=list)


def read(path: Path) -> Library:
    """Parses a library.

    Raises:
        ValueError: it is no 64-bit little-endian Mach-O file.
    """
    data = path.read_bytes()
    magic, cpu, _, file_type, command_count = struct.unpack_from("<5I", data)
    if magic != _MAGIC_64:
        raise ValueError(f"{path}: not a 64-bit Mach-O file (it begins with {magic:#x})")
    library = Library(cpu == _CPU_ARM64, _FILE_TYPES.get(file_type, f"type {file_type}"))
    at, symtab = 32, (0, 0, 0)
    for _ in range(command_count):
        command, nbytes = struct.unpack_from("<2I", data, at)
        if command in _LOAD_DYLIB:
            begin = at + struct.unpack_from("<I", data, at + 8)[0]
            library.dylibs.append(data[begin : data.index(b"\0", begin)].decode())
        elif command == _BUILD_VERSION:
            platform, minimum = struct.unpack_from("<2I", data, at + 8)
            library.is_macos = platform == _PLATFORM_MACOS
            library.minimum_version = (minimum >> 16, minimum >> 8 & 0xFF)
        elif command == _SYMTAB:
            symtab = struct.unpack_from("<3I", data, at + 8)
        at += nbytes
    _read_symbols(library, data, *symtab)
    return library


def _read_symbols(library: Library, data: bytes, offset: int, count: int, names: int) -> None:
    for i in range(count):
        name_at, kind, _, description = struct.unpack_from("<IBBH", data, offset + 16 * i)
        is_debug, is_external = kind & 0xE0, kind & 0x01
        if is_debug or not is_external:
            continue
        begin = names + name_at
        name = data[begin : data.index(b"\0", begin)].decode()
        if kind & 0x0E:  # defined
            if not kind & 0x10:  # and not private
                library.exported.append(name)
            continue
        ordinal = description >> 8
        known = 1 <= ordinal <= len(library.dylibs)
        library.undefined[library.dylibs[ordinal - 1] if known else FLAT].append(name)


def faults(library: Library, minimum_version: tuple[int, int], module: str) -> list[str]:
    """What is wrong with the extension `module`; empty where all is well."""
    found = []
    if not library.is_arm64:
        found.append("it is not for arm64")
    if library.file_type not in _FILE_TYPES.values():
        found.append(f"it is no library: {library.file_type}")
    if not library.is_macos or library.minimum_version != minimum_version:
        found.append(f"its minimum version of macOS is {library.minimum_version}, not {minimum_version}")
    unresolved = sorted(name for name in library.undefined.get(FLAT, ()) if not _PYTHONS.match(name))
    if unresolved:
        found.append("no library has " + ", ".join(unresolved))
    if f"_PyInit_{module}" not in library.exported:
        found.append(f"it does not export PyInit_{module}")
    return found
