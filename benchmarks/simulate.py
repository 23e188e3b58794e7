"""What the simulator says of a fleet, and how far it is to be believed.

    python benchmarks/simulate.py                        # the table of docs/simulator.md, as markdown
    python benchmarks/simulate.py --write docs           # the same into docs/: JSON, plot, and the page's table
    python benchmarks/simulate.py --fit four.json --predict eight.json

The fleet: one training step, whose backward takes 1.09 s and fills eighteen buckets of 25 MiB evenly, on Macs whose
link has a latency of 306 µs and a goodput of 1.238 GB/s (the figures of arXiv 2610.39029 for a Mac Studio on 10 GbE).
Exposed is the communication that backward does not hide. The share of goodput is what the buckets have to move,
2(N-1)/N of their bytes, against what the link could have moved while at least one bucket was under way.

--fit takes latency and goodput from measured rows of one world, --predict compares other rows with what follows.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from line_chart import line_chart
from link_model import FORWARD_NBYTES, SEGMENT_NBYTES, LinkModel, Row, fit, relative_error

from mccl_core import _C

MIB = 1024 * 1024
WORLDS = [24, 70, 100, 200, 1000]
BACKWARD_S = 1.09
BUCKETS = [25 * MIB] * 18
LINK = LinkModel(alpha_s=306e-6, goodput_bytes_per_s=1.238e9)
LARGEST_GROUP = 24  # Macs on one switch
# Algorithm and ops in flight; those that this build does not have are left out.
VARIANTS = [("ring", 1), ("ring", 2), ("ring", 4), ("circulant", 4), ("two_level", 4)]
TABLE_BEGIN, TABLE_END = "<!-- fleet: begin -->", "<!-- fleet: end -->"


def switch_groups(world: int) -> list[int]:
    """The switch of each rank: as many to a switch as divide the world, at least two switches."""
    size = max(size for size in range(1, LARGEST_GROUP + 1) if world % size == 0 and size <= world // 2)
    return [rank // size for rank in range(world)]


def covered_s(intervals: list[tuple[float, float]]) -> float:
    """Seconds in which at least one of the intervals is open."""
    total, end = 0.0, -math.inf
    for begin, finish in sorted(intervals):
        total += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return total


def simulate_step(algorithm: str, in_flight: int, world: int) -> Row:
    """One step of the fleet; times in ms."""
    count = len(BUCKETS)
    ready_s = [BACKWARD_S * (index + 1) / count for index in range(count)]
    groups = switch_groups(world) if algorithm == "two_level" else []
    result = LINK.simulate(algorithm, world, BUCKETS, ready_s, max_in_flight=in_flight, groups=groups)
    communicating_s = covered_s(list(zip(result["posted_s"], result["finish_s"], strict=True)))
    wire_s = 2 * (world - 1) / world * sum(BUCKETS) / LINK.goodput_bytes_per_s
    return {
        "algorithm": algorithm,
        "in_flight": in_flight,
        "world": world,
        "step_ms": result["last_finish_s"] * 1e3,
        "exposed_ms": (result["last_finish_s"] - BACKWARD_S) * 1e3,
        "goodput_share": wire_s / communicating_s,
    }


def variant_name(row: Row) -> str:
    """("ring", 1) → "ring, 1 in flight"."""
    return f"{row['algorithm'].replace('_', '-')}, {row['in_flight']} in flight"


def simulate_fleet(worlds: list[int]) -> list[Row]:
    """One row a variant and world."""
    known = _C.all_reduce_algorithms()
    rows = []
    for algorithm, in_flight in VARIANTS:
        for world in worlds:
            if algorithm in known:
                rows.append(simulate_step(algorithm, in_flight, world))
                print(f"{variant_name(rows[-1])}, {world} Macs", file=sys.stderr)
    return rows


def fleet_table(rows: list[Row]) -> str:
    """Variants down, worlds across: step / exposed / share of goodput."""
    worlds = sorted({row["world"] for row in rows})
    cells: dict[str, list[str]] = {}
    for row in rows:
        cell = f"{row['step_ms']:,.0f} / {row['exposed_ms']:,.0f} / {row['goodput_share']:.0%}"
        cells.setdefault(variant_name(row), []).append(cell)
    head = [f"{world:,} Macs" for world in worlds]
    lines = [f"| step ms / exposed ms / share of goodput | {' | '.join(head)} |", "| --- " * (len(worlds) + 1) + "|"]
    return "\n".join(lines + [f"| {name} | {' | '.join(values)} |" for name, values in cells.items()])


def fleet_plot(rows: list[Row]) -> str:
    """Exposed communication over the number of Macs, as SVG."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        series.setdefault(variant_name(row), []).append((row["world"], row["exposed_ms"]))
    return line_chart("Communication that backward does not hide", "Macs", "exposed, ms a step", series)


def write_fleet(rows: list[Row], folder: Path) -> None:
    """Writes simulator-fleet.json and .svg, and the table into simulator.md between its marks."""
    page = folder / "simulator.md"
    before, _, rest = page.read_text().partition(TABLE_BEGIN)
    _, mark, after = rest.partition(TABLE_END)
    if not mark:
        sys.exit(f"simulate.py: {page} lacks the marks {TABLE_BEGIN} and {TABLE_END}")
    page.write_text(f"{before}{TABLE_BEGIN}\n{fleet_table(rows)}\n{TABLE_END}{after}")
    described = {
        "model": asdict(LINK) | {"segment_nbytes": SEGMENT_NBYTES, "forward_nbytes": FORWARD_NBYTES},
        "backward_s": BACKWARD_S,
        "buckets_nbytes": BUCKETS,
        "command": shlex.join(["python", *sys.argv]),
        "rows": rows,
    }
    (folder / "simulator-fleet.json").write_text(json.dumps(described, indent=1) + "\n")
    (folder / "simulator-fleet.svg").write_text(fleet_plot(rows))


def read_rows(files: list[Path], world: int | None = None) -> list[Row]:
    """The rows of result files; of one world where one is named."""
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    return [row for row in rows if world is None or row["world"] == world]


def prediction_table(model: LinkModel, rows: list[Row]) -> str:
    """Predicted against measured, row by row."""
    lines = [
        "| ranks | bytes | in flight | measured, ms | predicted, ms | error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        error = relative_error(model, row)
        lines.append(
            f"| {row['world']} | {row['bytes']:,} | {row.get('in_flight', 1)} | {row['mccl_ms']:.3f} "
            f"| {(1 + error) * row['mccl_ms']:.3f} | {error:+.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parses, simulates, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS, help="numbers of Macs in the fleet's table")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the fleet's JSON, plot and table there")
    parser.add_argument("--fit", type=Path, nargs="+", metavar="JSON", help="results to take the link's figures from")
    parser.add_argument("--world", type=int, help="use only rows of this world for --fit")
    parser.add_argument("--predict", type=Path, nargs="+", metavar="JSON", help="results to compare with the model")
    arguments = parser.parse_args()
    if min(arguments.worlds) < 2:
        parser.error("--worlds: one Mac has nobody to exchange with; give numbers from 2 on")
    if arguments.predict and not arguments.fit:
        parser.error("--predict needs --fit: which measurements is the link to be taken from?")
    if not arguments.fit:
        rows = simulate_fleet(arguments.worlds)
        if arguments.write:
            write_fleet(rows, arguments.write)
        print(fleet_table(rows))
        return
    fitted = read_rows(arguments.fit, arguments.world)
    try:
        model = fit(fitted)
    except ValueError as error:
        parser.error(str(error))
    print(f"latency {model.alpha_s * 1e6:.1f} µs, goodput {model.goodput_bytes_per_s / 1e9:.4f} GB/s, fitted to:\n")
    print(prediction_table(model, fitted))
    if arguments.predict:
        print("\nand what follows for:\n")
        print(prediction_table(model, [row for row in read_rows(arguments.predict) if row not in fitted]))


if __name__ == "__main__":
    main()
