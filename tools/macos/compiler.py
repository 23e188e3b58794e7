"""The compiler and linker: zig's clang, aimed at macOS arm64, with a store of object files.

An object is stored under a hash of all that went into it, wherever the sources lie: a second build, or one of a changed
copy, compiles what has changed and no more.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

MINIMUM_VERSION = (14, 0)  # of macOS; PyTorch's wheels have the same
_TARGET = f"aarch64-macos.{MINIMUM_VERSION[0]}.{MINIMUM_VERSION[1]}"
# zig's own libc++ comes with Apple's marks of what is in which macOS switched off; they are wanted, and their misuse an
# error. Libraries of PyTorch and the system throw and catch across, so the sanitizers that zig adds are off, too.
_FLAGS = (
    "-std=c++20",
    "-O1",
    "-g0",
    "-fPIC",
    "-fno-sanitize=all",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-U_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS",
    "-D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=1",
    "-Wall",
    "-Wextra",
    "-Werror=unguarded-availability",
    "-Werror=return-type",
)

# What the headers instantiate is compiled with them, not again with each source.
_PREFIX_FLAGS = ("-Xclang", "-fpch-instantiate-templates")

_INCLUDE = re.compile(rb'^#include "([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Unit:
    """One source to compile. `inputs` names versions of what it includes from outside of the sources.

    `prefix` is a header of headers from outside that are compiled once for all units with the same flags and inputs.
    """

    source: Path
    flags: tuple[str, ...]
    include: tuple[Path, ...]
    inputs: tuple[str, ...]
    prefix: Path | None = None


class BuildError(Exception):
    """A source does not compile or objects do not link; the text is the compiler's."""


class Compiler:
    """`zig` is the program; objects and zig's own cache go below `cache`."""

    def __init__(self, zig: Path, cache: Path) -> None:
        self._zig = zig
        self._objects = cache / "objects"
        self._objects.mkdir(parents=True, exist_ok=True)
        zig_cache = str(cache / "zig")
        self._environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": zig_cache, "ZIG_LOCAL_CACHE_DIR": zig_cache}

    def compile_all(self, units: Sequence[Unit], sources: Path, jobs: int) -> list[Path]:
        """Returns the units' objects, in order. The first that fails ends it. `sources` is where includes begin.

        Raises:
            BuildError: a source does not compile.
        """
        with ThreadPoolExecutor(jobs) as pool:
            # Submitted first, so that none waits for a prefix that has no thread to be compiled on.
            prefixes = {_prefix_of(unit): pool.submit(self._compile_prefix, unit) for unit in units if unit.prefix}
            futures = [pool.submit(self._compile, unit, sources, prefixes.get(_prefix_of(unit))) for unit in units]
            try:
                return [future.result() for future in futures]
            except BuildError:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def link(self, objects: Sequence[Path], libraries: Sequence[Path], output: Path) -> None:
        """Links a dynamic library. Symbols that no library has are left to the check of the result.

        Raises:
            BuildError: the linker failed.
        """
        output.parent.mkdir(parents=True, exist_ok=True)
        # Python's symbols come from the interpreter: the linker has to let unknown ones pass, and with them all others.
        command: list[str | Path] = [
            "-shared",
            "-nostdlib++",
            "-undefined",
            "dynamic_lookup",
            *objects,
            *libraries,
            "-o",
            output,
        ]
        self._run(command, f"{output.name} does not link")

    def _compile(self, unit: Unit, sources: Path, prefix: Future[Path] | None) -> Path:
        digest = _digest(unit.source, sources)
        if unit.prefix is not None:
            digest += hashlib.sha256(unit.prefix.read_bytes()).hexdigest()
        target = self._stored(".o", *_FLAGS, *unit.flags, *unit.inputs, unit.source.name, digest)
        if not target.exists():
            flags = [*_FLAGS, *unit.flags, "-I", sources, *_system(unit.include)]
            if prefix is not None:
                flags += ["-include-pch", prefix.result()]
            self._make(target, [*flags, "-c", unit.source], f"{unit.source} does not compile")
        return target

    def _compile_prefix(self, unit: Unit) -> Path:
        assert unit.prefix is not None
        flags = (*_FLAGS, *unit.flags, *_PREFIX_FLAGS)
        target = self._stored(".pch", *flags, *unit.inputs, *map(str, unit.include), unit.prefix.read_text())
        if not target.exists():
            arguments = [*flags, *_system(unit.include), "-x", "c++-header", unit.prefix]
            self._make(target, arguments, f"{unit.prefix} does not compile")
        return target

    def _stored(self, suffix: str, *made_of: str) -> Path:
        return self._objects / (hashlib.sha256("\0".join(made_of).encode()).hexdigest() + suffix)

    def _make(self, target: Path, arguments: Sequence[str | Path], failure: str) -> None:
        temporary = target.with_name(f"{target.stem}.{os.getpid()}{target.suffix}")
        self._run([*arguments, "-o", temporary], failure)
        temporary.replace(target)

    def _run(self, arguments: Sequence[str | Path], failure: str) -> None:
        command = [self._zig, "c++", "-target", _TARGET, *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise BuildError(f"{failure}:\n{done.stderr.strip()[-6000:]}")


def _prefix_of(unit: Unit) -> tuple[object, ...]:
    return (unit.prefix, unit.flags, unit.include, unit.inputs)


def _system(folders: Sequence[Path]) -> list[str | Path]:
    return [flag for folder in folders for flag in ("-isystem", folder)]


def _digest(source: Path, sources: Path) -> str:
    """A hash over a source and those of our headers that it includes, and that they do."""
    digest, todo, seen = hashlib.sha256(), [source], {source}
    while todo:
        text = todo.pop().read_bytes()
        digest.update(text)
        for name in _INCLUDE.findall(text):
            header = sources / name.decode()
            if header.is_file() and header not in seen:
                seen.add(header)
                todo.append(header)
    return digest.hexdigest()
