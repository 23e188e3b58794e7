"""All-reduces back to back for minutes, every result checked bit for bit, while memory is watched.

    python benchmarks/soak.py --world 8 --minutes 10 --markdown --output result.json
    MCCL_TRANSPORT=tcp python benchmarks/soak.py

Ranks are processes of this machine. Sizes (of all magnitudes alike), dtypes (float32, float64, bfloat16, int64) and how
many ops are in flight at once are drawn from the seed; known_sums.py says what is reduced, and why no wrong bit goes
unseen. A rank's resident memory may grow by 8 MiB at most from a tenth of the time to the end, its threads and
descriptors not at all. Bytes are those of the tensors. Needs Linux.

Exit status: 0; 1 where a bit was wrong or something grew, or a rank failed; 2 for options that cannot be.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp
from known_sums import MOST_RANKS, KnownSums
from measure import KIB, MIB, describe, import_mccl
from options import new_file, positive, whole
from soak_rank import Soak, run_rank

LEAST_NBYTES, MOST_NBYTES = KIB, 25_000_000
MOST_GROWTH = {"rss_nbytes": 8 * MIB, "threads": 0, "descriptors": 0}  # of one rank
TRANSPORTS = {"auto": "Unix sockets", "tcp": "TCP over loopback"}

RankRow = dict[str, Any]


def run_world(soak: Soak) -> list[RankRow]:
    """Starts the ranks and waits for them; returns what each reports."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sums = KnownSums(soak.world, soak.most_nbytes, soak.seed)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run_rank, args=(soak, sums, port, folder), nprocs=soak.world, start_method="fork")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(soak.world)]


def problems(rows: list[RankRow]) -> list[str]:
    """What should not have been, in words; empty where all is well."""
    found = []
    for row in rows:
        if row["wrong_bits"]:
            found.append(f"rank {row['rank']}: {row['wrong_bits']} wrong bits: {'; '.join(row['wrong_results'])}")
        for what, allowed in MOST_GROWTH.items():
            before, after = row["before"][what], row["after"][what]
            if after - before > allowed:
                found.append(f"rank {row['rank']}: {what} grew from {before} to {after}; {allowed} more are allowed")
    return found


def _mean(rows: list[RankRow], value: Callable[[RankRow], float]) -> float:
    return statistics.mean(value(row) for row in rows)


def _held(rows: list[RankRow], when: str) -> str:
    rss, pss = (max(row[when][name] for row in rows) / MIB for name in ("rss_nbytes", "pss_nbytes"))
    return f"{rss:.1f} ({pss:.1f})"


# Column of the table → the cell's text. "A rank" is the mean; memory is that of the rank that has the most.
COLUMNS: dict[str, Callable[[list[RankRow]], str]] = {
    "ranks": lambda rows: f"{len(rows)}",
    "minutes": lambda rows: f"{rows[0]['seconds'] / 60:.1f}",
    "all-reduces a rank": lambda rows: f"{rows[0]['operations']:,}",
    "TB a rank": lambda rows: f"{rows[0]['bytes'] / 1e12:.4f}",
    "wrong bits": lambda rows: f"{sum(row['wrong_bits'] for row in rows)}",
    "cores a rank": lambda rows: f"{_mean(rows, lambda row: row['cpu_s'] / row['seconds']):.2f}",
    "without the checks": lambda rows: (
        f"{_mean(rows, lambda row: (row['cpu_s'] - row['checking_cpu_s']) / row['seconds']):.2f}"
    ),
    "RSS (PSS) at 10%, MiB": lambda rows: _held(rows, "before"),
    "RSS (PSS) at the end, MiB": lambda rows: _held(rows, "after"),
    "parked at most, MiB": lambda rows: f"{max(row['most_parked_bytes'] for row in rows) / MIB:.1f}",
}


def table(rows: list[RankRow]) -> str:
    """One line for all ranks, as Markdown."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), [cell(rows) for cell in COLUMNS.values()]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=whole(2, MOST_RANKS, " ranks"), default=8, help="number of ranks")
    parser.add_argument("--minutes", type=positive("minutes"), default=10.0, help="how long")
    parser.add_argument("--in-flight", type=whole(1, 64), default=4, help="ops at once, at most")
    parser.add_argument("--seed", type=whole(0, 2**31), default=1, help="of sizes, dtypes, values and their order")
    parser.add_argument("--commit", help="the commit that the result states, for a copy without its .git")
    parser.add_argument("--output", type=new_file, help="write the result as JSON to this file")
    parser.add_argument("--markdown", action="store_true", help="print a table instead of JSON")
    return parser, parser.parse_args()


def main() -> int:
    """Parses, runs, prints; returns the exit status."""
    parser, arguments = parse()
    if sys.platform != "linux":
        parser.error("this needs Linux: what a process holds is read from /proc")
    try:
        import_mccl()
        from mccl_core.config import CoreConfig

        transport = CoreConfig.from_environment().transport
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    soak = Soak(arguments.world, 60 * arguments.minutes, LEAST_NBYTES, MOST_NBYTES, arguments.in_flight, arguments.seed)
    rows = run_world(soak)
    found = problems(rows)
    link = f"between processes of one machine, {TRANSPORTS[transport]}"
    result = describe(link, arguments.commit) | {"transport": transport, "soak": asdict(soak)}
    text = json.dumps(result | {"most_growth": MOST_GROWTH, "problems": found, "rows": rows}, indent=2)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(table(rows) if arguments.markdown else text)
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
