"""What the all-reduce benchmarks share: both backends in turns on one rank, and how results are told.

Each point alternates short blocks of both backends, so that whatever else the machine does hits both alike. Times are
those of rank 0 for back-to-back batches of float32 SUM all-reduces; the figure is their median. A batch is
`in_flight` asynchronous all-reduces, each of its own tensor, all started before the first is waited for.
Bus bandwidth = 2(N-1)/N × bytes / time. Processor seconds are user and system time of all ranks' processes.
"""

from __future__ import annotations

import math
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

KIB, MIB = 1024, 1024 * 1024
BACKENDS = ("mccl", "gloo")
BLOCKS = 5
MIN_COUNT, MAX_COUNT = 3, 2000  # batches of a block, unless a burst asks for more
WARM_COUNT = 3
MIN_BATCHES = 50  # where each fits the burst

Row = dict[str, float]


@dataclass(frozen=True)
class Plan:
    """What to measure; the same on every rank.

    `seconds` is the measuring time for one size and backend. Each figure moves at least `min_wire_nbytes` over each
    rank's link, however long that takes. `burst_nbytes` pass a shaper at once: a batch that fits them does not wait for
    it and tells latency, so that MIN_BATCHES are enough there.
    """

    sizes: tuple[int, ...]
    seconds: float
    in_flight: int = 1
    min_wire_nbytes: int = 0
    burst_nbytes: int = 0

    def least_batches(self, nbytes: int, world: int) -> int:
        """Batches of a figure, whatever time they take."""
        wire_nbytes = nbytes * self.in_flight * wire_share(world)
        if wire_nbytes <= self.burst_nbytes:
            return MIN_BATCHES
        return math.ceil(self.min_wire_nbytes / wire_nbytes)


def import_mccl() -> None:
    """Makes `mccl` known where the package is only on the path and not installed.

    Raises:
        RuntimeError: it is neither.
    """
    try:
        import mccl_core  # noqa: F401
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"cannot import mccl_core ({error}): install the package, or put the folder that holds the compiled "
            "mccl_core on PYTHONPATH"
        ) from error


def wire_share(world: int) -> float:
    """Bytes that each rank has to send for each byte of an all-reduced tensor: 2(N-1)/N."""
    return 2 * (world - 1) / world


def measure_rank(plan: Plan) -> list[Row]:
    """Measures all sizes on this rank of an initialised Gloo group; rank 0's rows are the result. Blocks."""
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    return [_measure_size(groups, nbytes, plan) for nbytes in plan.sizes]


def _measure_size(groups: dict[str, dist.ProcessGroup], nbytes: int, plan: Plan) -> Row:
    world = dist.get_world_size()
    tensors = [torch.zeros(nbytes // 4) for _ in range(plan.in_flight)]
    batch_nbytes = nbytes * plan.in_flight
    least = math.ceil(plan.least_batches(nbytes, world) / BLOCKS)
    warm = {name: max(_batches(groups[name], tensors, WARM_COUNT)[1:]) for name in BACKENDS}
    # All ranks must do the same number: rank 0's estimate decides.
    by_time = [min(MAX_COUNT, max(MIN_COUNT, int(plan.seconds / BLOCKS / warm[name]))) for name in BACKENDS]
    counts = torch.tensor([max(count, least) for count in by_time])
    dist.broadcast(counts, 0)
    times: dict[str, list[float]] = {name: [] for name in BACKENDS}
    cpu_s = torch.zeros(len(BACKENDS), dtype=torch.float64)
    for _ in range(BLOCKS):
        for index, name in enumerate(BACKENDS):
            dist.barrier()
            before = processor_s()
            times[name] += _batches(groups[name], tensors, int(counts[index]))
            cpu_s[index] += processor_s() - before
    dist.all_reduce(cpu_s)
    row: Row = {"world": world, "bytes": nbytes, "in_flight": plan.in_flight}
    for index, name in enumerate(BACKENDS):
        median_s = statistics.median(times[name])
        row[f"{name}_batches"] = len(times[name])
        if plan.burst_nbytes:
            row[f"{name}_bursts_moved"] = len(times[name]) * batch_nbytes * wire_share(world) / plan.burst_nbytes
        row[f"{name}_ms"] = median_s * 1e3
        row[f"{name}_busbw_GBps"] = wire_share(world) * batch_nbytes / 1e9 / median_s
        row[f"{name}_cpu_s_per_GB"] = float(cpu_s[index]) / (len(times[name]) * batch_nbytes / 1e9)
    row["speedup"] = row["gloo_ms"] / row["mccl_ms"]
    return row


def _batches(group: dist.ProcessGroup, tensors: list[torch.Tensor], count: int) -> list[float]:
    """Seconds of each of `count` back-to-back batches, as this rank sees them."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        if len(tensors) == 1:
            dist.all_reduce(tensors[0], group=group)
        else:
            works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
            for work in works:
                work.wait()
        times.append(time.perf_counter() - start)
    return times


def processor_s() -> float:
    """User and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def describe(link: str, commit: str | None) -> dict[str, object]:
    """What a reader needs to judge the figures: hardware, system, versions, commit, command and the link.

    `commit` is None where the checkout itself knows it.
    """
    return {
        "hardware": f"{os.cpu_count()} cores, {_processor()}",
        "system": f"{platform.system()} {platform.release()}",
        "link": link,
        "torch": torch.__version__,
        "commit": commit or _commit(),
        "command": shlex.join(["python", *sys.argv]),
    }


def _commit() -> str:
    """The checkout's commit, or "unknown" where this is none, or there is no git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    """The processor's name, as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def size_name(row: Row) -> str:
    """1024 → "1 KiB"; "4 × 1 KiB" where four are in flight; 1000 → "1000 B"."""
    nbytes, in_flight = int(row["bytes"]), int(row["in_flight"])
    if nbytes % MIB == 0:
        name = f"{nbytes // MIB} MiB"
    elif nbytes % KIB == 0:
        name = f"{nbytes // KIB} KiB"
    else:
        name = f"{nbytes} B"
    return name if in_flight == 1 else f"{in_flight} × {name}"


# Column of a table → the cell's text.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "ranks": lambda row: f"{row['world']:.0f}",
    "size": size_name,
    "mccl, ms": lambda row: f"{row['mccl_ms']:.3f}",
    "Gloo, ms": lambda row: f"{row['gloo_ms']:.3f}",
    "mccl busbw, GB/s": lambda row: f"{row['mccl_busbw_GBps']:.3f}",
    "Gloo busbw, GB/s": lambda row: f"{row['gloo_busbw_GBps']:.3f}",
    "Gloo time / mccl time": lambda row: f"{row['speedup']:.1f}×",
    "mccl CPU s/GB": lambda row: f"{row['mccl_cpu_s_per_GB']:.2f}",
    "Gloo CPU s/GB": lambda row: f"{row['gloo_cpu_s_per_GB']:.2f}",
    "mccl / iperf3": lambda row: f"{row['mccl_share']:.1%}",
    "Gloo / iperf3": lambda row: f"{row['gloo_share']:.1%}",
}
