"""Packages that the build needs, fetched by pip and unpacked into a cache."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ZIG = "0.17.1"
MLX_METAL = "0.32.4"


@dataclass(frozen=True)
class Package:
    """One release of a package and the files of it that are kept; `platform` is pip's, None for this machine's."""

    name: str
    version: str
    members: tuple[str, ...]
    platform: str | None = None


def metal_cpp() -> Package:
    """Apple's C++ headers of Metal."""
    return Package("mlx-metal", MLX_METAL, ("mlx/include/metal_cpp/*",), "macosx_14_0_arm64")


def torch(version: str) -> Package:
    """PyTorch for a Mac: headers and the libraries that the extension links to."""
    members = ("torch/include/*", "torch/lib/libtorch*.dylib", "torch/lib/libc10.dylib")
    return Package("torch", version, members, "macosx_14_0_arm64")


def unpack(package: Package, cache: Path) -> Path:
    """Returns the folder with the package's files; fetches it where it is not there yet.

    Raises:
        SystemExit: pip could not get it; pip's own words come first.
    """
    folder = cache / f"{package.name}-{package.version}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=f"{package.name}-") as temporary:
        wheel = _download(package, Path(temporary))
        unpacked = Path(temporary) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if any(fnmatch(name, pattern) for pattern in package.members):
                    archive.extract(name, unpacked)
        shutil.move(unpacked, folder)
    return folder


def zig_program(cache: Path) -> Path:
    """The compiler, for this machine."""
    program = unpack(Package("ziglang", ZIG, ("ziglang/*",)), cache) / "ziglang" / "zig"
    program.chmod(0o755)  # which unzipping loses
    return program


def _download(package: Package, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(folder),
    ]
    if package.platform is not None:
        # Of a Mac's wheel only what is the same for every Python is used.
        command += ["--platform", package.platform, "--python-version", "3.11"]
    done = subprocess.run([*command, f"{package.name}=={package.version}"])
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise SystemExit(f"pip could not get {package.name} {package.version}; see above")
    return wheels[0]
