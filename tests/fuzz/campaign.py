"""Fuzzes the frame parser and the engine's receive side under the address and undefined-behaviour sanitizers.

    python tests/fuzz/campaign.py --minutes 10

Half of the time goes to each program. What was found on the way is kept in build/fuzz/corpus and used again; an input
that makes a program fail is kept in build/fuzz and named.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "fuzz"
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
PROGRAMS = ("frame_fuzz", "receive_fuzz")
# -timeout: a hang. -malloc_limit_mb: one allocation beyond what any input may cause.
LIMITS = ("-timeout=60", "-rss_limit_mb=2048", "-malloc_limit_mb=64", "-max_len=2048", "-len_control=0")


def build() -> None:
    """Builds both programs, with clang where it is installed."""
    switches = ["-DMCCL_BUILD_TORCH=OFF", "-DMCCL_BUILD_FUZZERS=ON", "-DMCCL_SANITIZE=address,undefined"]
    if shutil.which("clang++"):
        switches.append("-DCMAKE_CXX_COMPILER=clang++")
    cmake = shutil.which("cmake", path=Path(sys.executable).parent) or "cmake"
    subprocess.run([cmake, "-S", ROOT, "-B", BUILD, "-DCMAKE_CXX_FLAGS_RELEASE=-O1", *switches], check=True)
    subprocess.run([cmake, "--build", BUILD, "--parallel", "2"], check=True)


def fuzz(program: str, seconds: int) -> int:
    """Runs one program; returns its exit status."""
    grown = BUILD / "corpus" / program
    grown.mkdir(parents=True, exist_ok=True)
    kept = [folder for folder in [CORPUS / program] if folder.is_dir()]
    command = [BUILD / program, f"-max_total_time={seconds}", *LIMITS, grown, *kept]
    print(f"{program}: {seconds} s", flush=True)
    return subprocess.run(command, cwd=BUILD).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="for both programs together")
    arguments = parser.parse_args()
    build()
    seconds = max(1, round(arguments.minutes * 60 / len(PROGRAMS)))
    failed = [program for program in PROGRAMS if fuzz(program, seconds) != 0]
    for program in failed:
        print(f"{program}: failed; the input is in {BUILD}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
