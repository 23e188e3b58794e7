"""All-reduce: mccl against Gloo, in the same processes, in turns.

    python benchmarks/allreduce.py --world 2 4 --markdown

Each point alternates short blocks of both backends, so that whatever else the machine does hits both alike. Times are
those of rank 0 for back-to-back `torch.distributed.all_reduce` calls of float32 SUM; the figure is their median.
Bus bandwidth = 2(N-1)/N × bytes / time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

KIB, MIB = 1024, 1024 * 1024
SIZES = [KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
BACKENDS = ("mccl", "gloo")
BLOCKS = 5


def measure(group: dist.ProcessGroup, tensor: torch.Tensor, iterations: int) -> list[float]:
    """Seconds of each of `iterations` back-to-back all-reduces, as this rank sees them."""
    times = []
    for _ in range(iterations):
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        times.append(time.perf_counter() - start)
    return times


def run_rank(rank: int, world: int, port: int, sizes: list[int], seconds: float, output: str) -> None:
    """One rank of one world: all sizes, both backends in turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    rows = []
    for nbytes in sizes:
        tensor = torch.zeros(nbytes // 4)
        warm = {name: max(measure(groups[name], tensor, 3)[1:]) for name in BACKENDS}
        # All ranks must do the same number: rank 0's estimate decides.
        counts = torch.tensor([min(2000, max(3, int(seconds / BLOCKS / warm[n]))) for n in BACKENDS])
        dist.broadcast(counts, 0)
        times: dict[str, list[float]] = {name: [] for name in BACKENDS}
        for _ in range(BLOCKS):
            for name, count in zip(BACKENDS, counts.tolist(), strict=True):
                dist.barrier()
                times[name] += measure(groups[name], tensor, count)
        rows.append(
            {"world": world, "bytes": nbytes} | {f"{n}_ms": statistics.median(times[n]) * 1e3 for n in BACKENDS}
        )
    if rank == 0:
        Path(output).write_text(json.dumps(rows))
    dist.destroy_process_group()


def run_world(world: int, sizes: list[int], seconds: float) -> list[dict[str, float]]:
    """Starts `world` ranks on loopback; returns one row a size."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        mp.start_processes(run_rank, args=(world, port, sizes, seconds, file.name), nprocs=world, start_method="fork")
        rows = json.loads(Path(file.name).read_text())
    for row in rows:
        factor = 2 * (world - 1) / world * row["bytes"] / 1e9
        for name in BACKENDS:
            row[f"{name}_busbw_GBps"] = factor / (row[f"{name}_ms"] / 1e3)
        row["speedup"] = row["gloo_ms"] / row["mccl_ms"]
    return rows


def processor() -> str:
    """The processor's name, as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def describe() -> dict[str, object]:
    """What a reader needs to judge the figures."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return {
        "hardware": f"{os.cpu_count()} cores, {processor()}",
        "system": f"{platform.system()} {platform.release()}",
        "link": "loopback, not shaped",
        "torch": torch.__version__,
        "commit": commit.stdout.strip() or "unknown",
        "command": shlex.join(["python", *sys.argv]),
    }


def size_name(nbytes: int) -> str:
    """1024 → "1 KiB"."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def markdown(rows: list[dict[str, float]]) -> str:
    """The rows as a table."""
    lines = [
        "| ranks | size | mccl, ms | Gloo, ms | mccl busbw, GB/s | Gloo busbw, GB/s | Gloo time / mccl time |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['world']} | {size_name(int(row['bytes']))} | {row['mccl_ms']:.3f} | {row['gloo_ms']:.3f} "
            f"| {row['mccl_busbw_GBps']:.3f} | {row['gloo_busbw_GBps']:.3f} | {row['speedup']:.1f}× |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parses, runs, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the tensor")
    parser.add_argument("--seconds", type=float, default=2.0, help="measuring time for one point and backend")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    parser.add_argument("--markdown", action="store_true", help="print a table instead of JSON")
    arguments = parser.parse_args()
    rows = [row for world in arguments.world for row in run_world(world, arguments.sizes, arguments.seconds)]
    result = describe() | {"rows": rows}
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(markdown(rows) if arguments.markdown else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
