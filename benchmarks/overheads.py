"""What signs of life and metrics cost a small op on loopback.

    python benchmarks/overheads.py --world 2 4

Heartbeats: for each interval there are `world` processes, all there at once; they all-reduce in short blocks in turns,
the others asleep meanwhile, in an order that is reversed each round. An interval's figure is the ratio of its block's
median to that of the longest interval in the same round; what is told is the median of the ratios and their quartiles.

Metrics and the flight record: a C++ program (overheads.cpp) calls just what the engine calls for one op, in a loop,
with the clock readings that only they need. The share is that time over the op's, with the default interval.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from measure import KIB, describe, import_mccl
from options import new_file, positive, tensor_nbytes, whole

ROOT = Path(__file__).parents[1]
NEVER_MS, DEFAULT_MS = 3_600_000, 5000
INTERVALS_MS = (NEVER_MS, DEFAULT_MS, 100)
WARM_COUNT = 200


def rank_main(rank: int, world: int, nbytes: int, interval_ms: int, store: str, pipe: Connection) -> None:
    """One rank with one interval: does as many all-reduces as it is told, until the pipe ends; reports their median."""
    os.environ["MCCL_HEARTBEAT_INTERVAL_MS"] = str(interval_ms)
    torch.set_num_threads(1)
    dist.init_process_group("mccl", init_method=f"file://{store}", rank=rank, world_size=world)
    tensor = torch.zeros(nbytes // 4)
    while True:
        try:
            count = pipe.recv()
        except EOFError:
            break
        times = []
        for _ in range(count):
            start = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - start)
        pipe.send(statistics.median(times))
    os._exit(0)


class Side:
    """The processes of one interval. Leaving the context ends them."""

    def __init__(self, world: int, nbytes: int, interval_ms: int, folder: str) -> None:
        context = mp.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            here, there = context.Pipe()
            arguments = (rank, world, nbytes, interval_ms, f"{folder}/store-{interval_ms}", there)
            process = context.Process(target=rank_main, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, count: int) -> float:
        """Seconds of the median of `count` all-reduces, as rank 0 sees them."""
        for pipe in self._pipes:
            pipe.send(count)
        medians_s: list[float] = [pipe.recv() for pipe in self._pipes]
        return medians_s[0]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def measure_intervals(world: int, nbytes: int, seconds: float, rounds: int) -> dict[int, list[float]]:
    """Interval in ms → seconds of an op, one for each round."""
    with tempfile.TemporaryDirectory() as folder:
        sides = {interval: Side(world, nbytes, interval, folder) for interval in INTERVALS_MS}
        try:
            warm_s = max(side.run(WARM_COUNT) for side in sides.values())
            count = max(50, int(seconds / warm_s))
            times: dict[int, list[float]] = {interval: [] for interval in sides}
            for number in range(rounds):
                for interval in INTERVALS_MS if number % 2 else reversed(INTERVALS_MS):
                    times[interval].append(sides[interval].run(count))
            return times
        finally:
            for side in sides.values():
                side.close()


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "lower_quartile": low, "upper_quartile": high}


def build(folder: str) -> Path:
    """Compiles overheads.cpp into the folder."""
    switches = ["-DMCCL_BUILD_TORCH=OFF", "-DMCCL_BUILD_BENCHMARKS=ON"]
    cmake = str(Path(sys.executable).with_name("cmake"))
    cmake = cmake if Path(cmake).exists() else "cmake"
    for command in (
        [cmake, "-S", str(ROOT), "-B", folder, *switches],
        [cmake, "--build", folder, "--parallel", "2", "--target", "overheads"],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Path(folder, "overheads")


def recording_ns(program: Path) -> dict[str, float]:
    """What metrics and the flight record cost one op of two ranks, as the program measures it."""
    done = subprocess.run([program], check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    """Parses, runs, prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=whole(2, 64, " ranks"), nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--bytes", type=tensor_nbytes, default=KIB, help="bytes of the tensor")
    parser.add_argument("--rounds", type=whole(4, 1000), default=24, help="blocks of each interval")
    parser.add_argument("--seconds", type=positive("seconds"), default=0.3, help="length of a block")
    parser.add_argument("--commit", help="the commit that the result states, for a copy without its .git")
    parser.add_argument("--output", type=new_file, help="write the result to this file")
    arguments = parser.parse_args()
    try:
        import_mccl()
    except RuntimeError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        recorded = recording_ns(build(folder))
    rows = []
    for world in arguments.world:
        times = measure_intervals(world, arguments.bytes, arguments.seconds, arguments.rounds)
        op_ns = statistics.median(times[DEFAULT_MS]) * 1e9
        row: dict[str, object] = {"world": world, "bytes": arguments.bytes, "op_ns": op_ns}
        for interval in INTERVALS_MS[1:]:
            ratios = [mine / never for mine, never in zip(times[interval], times[NEVER_MS], strict=True)]
            row[f"heartbeat_{interval}_ms_over_never"] = spread(ratios)
        for name, cost_ns in recorded.items():
            row[f"{name}_share"] = cost_ns / op_ns
        rows.append(row)
    result = describe("loopback, not shaped", arguments.commit) | {"recording_ns": recorded, "rows": rows}
    text = json.dumps(result, indent=2)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
