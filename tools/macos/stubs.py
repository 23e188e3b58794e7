"""Text stubs (.tbd) of the system's libraries, for the linker: what a symbol's library is, and that it has one.

What is not listed here does not link. For libc++ the list is that of macOS 14, for libSystem the compiler's own; of the
frameworks it is the few public symbols that the extension calls, kept by hand.
"""

from __future__ import annotations

from pathlib import Path

LIBCXX_SYMBOLS = Path(__file__).with_name("libcxx16-arm64.symbols")

_FRAMEWORKS = "/System/Library/Frameworks"
_OBJC = (
    "_objc_msgSend",
    "_objc_getClass",
    "_objc_autoreleasePoolPush",
    "_objc_autoreleasePoolPop",
    "_sel_registerName",
)
_ACCELERATE = ("_vDSP_vadd", "_vDSP_vaddD")


def write_stubs(folder: Path) -> list[Path]:
    """Writes the stubs into `folder`; returns them in the order in which they are linked."""
    folder.mkdir(parents=True, exist_ok=True)
    strong, weak = _libcxx()
    accelerate = f"{_FRAMEWORKS}/Accelerate.framework/Versions/A/Accelerate"
    return [
        _write(folder / "libc++.1.tbd", "/usr/lib/libc++.1.dylib", strong, weak),
        _write(folder / "libobjc.A.tbd", "/usr/lib/libobjc.A.dylib", _OBJC),
        _write(folder / "Accelerate.tbd", accelerate, _ACCELERATE),
    ]


def _libcxx() -> tuple[list[str], list[str]]:
    strong: list[str] = []
    weak: list[str] = []
    for line in LIBCXX_SYMBOLS.read_text().splitlines():
        if line.startswith("#"):
            continue
        name, _, kind = line.partition(" ")
        (weak if kind == "weak" else strong).append(name)
    return strong, weak


def _write(path: Path, install_name: str, symbols: tuple[str, ...] | list[str], weak: list[str] | None = None) -> Path:
    def listed(names: tuple[str, ...] | list[str]) -> str:
        return "[ " + ", ".join(f"'{name}'" for name in sorted(names)) + " ]"

    lines = [
        "--- !tapi-tbd",
        "tbd-version: 4",
        "targets: [ arm64-macos ]",
        f"install-name: '{install_name}'",
        "exports:",
        "  - targets: [ arm64-macos ]",
        f"    symbols: {listed(symbols)}",
    ]
    if weak:
        lines.append(f"    weak-symbols: {listed(weak)}")
    path.write_text("\n".join([*lines, "...", ""]))
    return path
