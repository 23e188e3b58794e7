"""One rank of soak.py: all-reduces back to back, each result checked, and what the process holds meanwhile."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from held import Held, held_after_trim, held_now
from known_sums import KnownSums, Op, draw_ops, largest_ops
from measure import processor_s

OPS_PER_STRETCH = 16  # then rank 0 says how to go on
BEFORE_S, SAMPLES = 0.1, 20  # memory is compared from this share of the time on; so many samples are kept
SAMPLE_S = 1.0  # between two samples, at most
MOST_TOLD = 10  # wrong results that are told one by one
GO_ON, LOOK, STOP = range(3)


@dataclass(frozen=True)
class Soak:
    """What to run; the same on every rank."""

    world: int
    seconds: float
    least_nbytes: int
    most_nbytes: int
    in_flight: int
    seed: int


@dataclass
class Report:
    """What one rank did and held in the measured time, which begins after the largest ops have run once."""

    rank: int
    seconds: float = 0.0
    operations: int = 0
    bytes: int = 0
    """Of the tensors that were all-reduced."""
    wrong_bits: int = 0
    wrong_results: list[str] = field(default_factory=list)
    """The first few: the op's number, its tensor."""
    cpu_s: float = 0.0
    checking_cpu_s: float = 0.0
    """The part of it that went into contributions and checks."""
    most_parked_bytes: int = 0
    before: Held | None = None
    """After a tenth of the time."""
    after: Held | None = None
    samples: list[dict[str, float]] = field(default_factory=list)


class _Flying(NamedTuple):
    number: int
    op: Op
    slot: int
    tensor: torch.Tensor
    work: dist.Work | None


class Rank:
    """The ops of one rank, in an initialised process group."""

    def __init__(self, rank: int, soak: Soak, sums: KnownSums) -> None:
        self.report = Report(rank)
        self._soak = soak
        self._sums = sums
        # Ones, not zeros or nothing: the memory is there from the start.
        self._buffers = [torch.ones(soak.most_nbytes, dtype=torch.uint8) for _ in range(soak.in_flight)]
        self._free = list(range(soak.in_flight))
        self._flying: list[_Flying] = []
        self._own = random.Random(soak.seed + rank)  # when each waits for what is its own affair

    def run(self) -> Report:
        """Runs and checks ops until rank 0 says that it is enough. Blocks.

        Raises:
            DistBackendError: an op failed.
        """
        soak, report = self._soak, self.report
        self._sums.touch()
        for _ in range(soak.in_flight):
            self._stretch(largest_ops(soak.world, soak.most_nbytes, soak.seed), soak.in_flight)
        wrong_bits, wrong_results = report.wrong_bits, report.wrong_results
        self.report = report = Report(report.rank, wrong_bits=wrong_bits, wrong_results=wrong_results)
        ops = draw_ops(soak.world, soak.least_nbytes, soak.most_nbytes, soak.seed)
        dist.barrier()
        start, cpu_s = time.monotonic(), processor_s()
        with _Samples(report, start, min(SAMPLE_S, soak.seconds / SAMPLES)):
            order = GO_ON
            while order != STOP:
                self._stretch(itertools.islice(ops, OPS_PER_STRETCH), self._own.randint(1, soak.in_flight))
                order = self._rank_0_says(time.monotonic() - start)
                if order == LOOK:
                    report.before = held_after_trim()
            report.seconds, report.cpu_s = time.monotonic() - start, processor_s() - cpu_s
            report.after = held_after_trim()
        dist.barrier()  # memory that is shared is no more one rank's than another's as long as all are here
        return report

    def _rank_0_says(self, elapsed_s: float) -> int:
        order = GO_ON
        if self.report.before is None:
            order = LOOK if elapsed_s >= BEFORE_S * self._soak.seconds else GO_ON
        elif elapsed_s >= self._soak.seconds:
            order = STOP
        said = torch.tensor([order])
        dist.broadcast(said, 0)
        return int(said.item())

    def _stretch(self, ops: Iterable[Op], depth: int) -> None:
        """Up to `depth` in flight at once; which of them is waited for first differs from rank to rank."""
        for op in ops:
            if len(self._flying) == depth:
                self._finish()
            self._start(op, wait=depth == 1)
        while self._flying:
            self._finish()

    def _start(self, op: Op, *, wait: bool) -> None:
        slot = self._free.pop()
        tensor = self._buffers[slot][: op.nbytes].view(op.dtype)
        before = time.thread_time()
        self._sums.contribute(op, self.report.rank, tensor)
        self.report.checking_cpu_s += time.thread_time() - before
        work = dist.all_reduce(tensor, async_op=not wait)
        self._flying.append(_Flying(self.report.operations, op, slot, tensor, work))
        self.report.operations += 1
        self.report.bytes += op.nbytes

    def _finish(self) -> None:
        done = self._flying.pop(self._own.randrange(len(self._flying)))
        if done.work is not None:
            done.work.wait()
        before = time.thread_time()
        wrong_bits = self._sums.wrong_bits(done.op, done.tensor)
        self.report.checking_cpu_s += time.thread_time() - before
        self._free.append(done.slot)
        if wrong_bits:
            self.report.wrong_bits += wrong_bits
            if len(self.report.wrong_results) < MOST_TOLD:
                what = f"{done.op.count} elements of {done.op.dtype}"
                self.report.wrong_results.append(f"op {done.number}, {what}: {wrong_bits} wrong bits")


class _Samples:
    """A thread that looks at this process at intervals, while the context lasts."""

    def __init__(self, report: Report, start: float, interval_s: float) -> None:
        self._report = report
        self._start = start
        self._interval_s = interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samples")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        from mccl_core import get_metrics  # not at the top: soak.py says what to do where it is missing

        samples: list[dict[str, float]] = []
        while not self._over.wait(self._interval_s):
            parked = get_metrics()["parked_bytes"]
            samples.append({"s": time.monotonic() - self._start, "parked_bytes": parked, **held_now()})
        self._report.most_parked_bytes = max((int(sample["parked_bytes"]) for sample in samples), default=0)
        self._report.samples = samples[:: max(1, len(samples) // SAMPLES)]


def run_rank(rank: int, soak: Soak, sums: KnownSums, port: int, folder: str) -> None:
    """A process that is one rank of the group; leaves its report in `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("mccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=soak.world)
    report = Rank(rank, soak, sums).run()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(asdict(report)))
    dist.destroy_process_group()
