"""Builds the extension for macOS arm64 against one or more releases of PyTorch, and checks it.

    python -m tools.macos [--torch 2.13.0] [--csrc mccl_core/csrc] [--jobs 2]

Exits with 1 where something does not compile, does not link, or is not as it has to be on a Mac.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import sysconfig
import time
from pathlib import Path

from tools.macos import macho, packages, selectors
from tools.macos.compiler import MINIMUM_VERSION, BuildError, Compiler, Unit
from tools.macos.stubs import write_stubs

ROOT = Path(__file__).parents[2]
TORCH_VERSIONS = ("2.12.1", "2.13.0", "2.14.1")
MODULE = "_C"
_TORCH_LIBRARIES = ("libtorch", "libtorch_cpu", "libtorch_python", "libc10")
_ENGINE = ("base", "io", "transport", "reduce", "schedule", "engine", "op", "device")
_PREFIX = Path(__file__).with_name("prefix.hpp")
_NEEDS_TORCH = ("device/metal/calls_apple.cpp", "torch/*.cpp")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.macos", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument(
        "--torch", action="append", help=f"release of PyTorch; again for more ({', '.join(TORCH_VERSIONS)})"
    )
    parser.add_argument("--csrc", type=Path, default=ROOT / "mccl_core" / "csrc", help="the C++ sources")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "macos", help="folder for results and caches")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    try:
        for version in options.torch or TORCH_VERSIONS:
            found = build(version, options.csrc, options.output, options.jobs)
            if found:
                print(f"torch {version}: FAILED: " + "; ".join(found), file=sys.stderr)
                return 1
            print(f"torch {version}: good, after {time.monotonic() - begin:.0f} s", flush=True)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def build(version: str, csrc: Path, output: Path, jobs: int) -> list[str]:
    """Builds for one release of PyTorch; returns what is wrong with the result.

    Raises:
        BuildError: a source does not compile or the objects do not link.
    """
    cache = output / "cache"
    metal_cpp = packages.unpack(packages.metal_cpp(), cache)
    found = selectors.faults(sorted((csrc / "device" / "metal").glob("*.cpp")), metal_cpp)
    if found:
        return found
    torch = packages.unpack(packages.torch(version), cache) / "torch"
    compiler = Compiler(packages.zig_program(cache), cache)
    objects = compiler.compile_all(units(csrc, torch, version, python_headers(cache)), csrc, jobs)
    libraries = [torch / "lib" / f"{name}.dylib" for name in _TORCH_LIBRARIES] + write_stubs(cache / "stubs")
    extension = (
        output / f"torch-{version}" / f"{MODULE}.cpython-{sys.version_info.major}{sys.version_info.minor}-darwin.so"
    )
    compiler.link(objects, libraries, extension)
    return macho.faults(macho.read(extension), MINIMUM_VERSION, MODULE)


def units(csrc: Path, torch: Path, version: str, python: Path) -> list[Unit]:
    """All that CMake compiles on a Mac."""
    needs_torch = sorted(path for pattern in _NEEDS_TORCH for path in csrc.glob(pattern))
    engine = sorted(path for folder in _ENGINE for path in (csrc / folder).rglob("*.cpp") if path not in needs_torch)
    defines = (f"-DTORCH_EXTENSION_NAME={MODULE}", "-DTORCH_API_INCLUDE_EXTENSION_H", "-DUSE_DISTRIBUTED", "-DUSE_C10D")
    include = (python, torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include")
    inputs = (f"torch {version}", f"zig {packages.ZIG}", sys.version)
    # While one thread compiles the prefix of those that need torch, the others have the engine's to do.
    return [Unit(path, ("-Werror",), (), inputs[1:2]) for path in engine] + [
        Unit(path, (*defines, "-Wno-unused-parameter"), include, inputs, _PREFIX) for path in needs_torch
    ]


def python_headers(cache: Path) -> Path:
    """This Python's headers, with a pyconfig.h for macOS in the place of this machine's."""
    source, pyconfig = Path(sysconfig.get_paths()["include"]), Path(__file__).with_name("pyconfig.h")
    if not (source / "Python.h").is_file():
        raise SystemExit(f"Python's headers are not in {source}: apt-get install python3-dev")
    # Made once: a compiled prefix is refused where a header's time of change is not what it was.
    digest = hashlib.sha256(sys.version.encode() + pyconfig.read_bytes()).hexdigest()
    target = cache / f"python-{sysconfig.get_python_version()}-{digest[:8]}"
    if not target.is_dir():
        temporary = target.with_suffix(f".{os.getpid()}")
        shutil.copytree(source, temporary)
        shutil.copy(pyconfig, temporary / "pyconfig.h")
        temporary.replace(target)
    return target


if __name__ == "__main__":
    sys.exit(main())
