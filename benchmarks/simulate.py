"""What the simulator says of a fleet, and how far it is to be believed.

    python benchmarks/simulate.py                        # the table of docs/simulator.md, as markdown
    python benchmarks/simulate.py --write docs           # the same into docs/: JSON, plot, and the page's table
    python benchmarks/simulate.py --fit four.json --predict eight.json

The fleet: one training step, whose backward takes 1.09 s and fills eighteen buckets of 25 MB evenly, on Macs whose
link has a latency of 306 µs and a goodput of 1.238 GB/s (the figures of arXiv 2610.39029 for a Mac Studio on 10 GbE),
behind as few switches of 24 as hold them, filled evenly. "As chosen" is what a job gets: the planner's algorithm and
chunks, and every bucket started when it is full.
Exposed is the communication that backward does not hide. The share of goodput is what the buckets have to move,
2(N-1)/N of their bytes, against what the link could have moved while at least one bucket was under way.

--fit takes latency and goodput from measured rows of one world, --predict compares other rows with what follows.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from line_chart import line_chart
from link_model import CONFIG, LinkModel, Row, fit, relative_error

from mccl_core import explain, links
from mccl_core.planning import share_switches
from mccl_core.simulation import Backward, simulate_step

WORLDS = [24, 70, 100, 200, 1000]
STEP = Backward(backward_ms=1090, bucket_count=18, bucket_nbytes=25_000_000)
LINK = links.ETHERNET_10G
LARGEST_GROUP = 24  # Macs on one switch
AS_CHOSEN = "as chosen"
# Algorithm and ops in flight, of which 0 is as many as there are.
VARIANTS = [("ring", 1), ("ring", 2), ("ring", 4), ("circulant", 4), ("two_level", 4), (AS_CHOSEN, 0)]
TABLE_BEGIN, TABLE_END = "<!-- fleet: begin -->", "<!-- fleet: end -->"


def simulate_variant(variant: str, in_flight: int, world: int) -> Row | None:
    """One step of the fleet; times in ms. None where the planner would never use that algorithm there."""
    groups = share_switches(world, LARGEST_GROUP)
    explanation = explain(
        "all_reduce",
        STEP.bucket_nbytes,
        world,
        profile=LINK,
        switch_groups=[str(group) for group in groups],
        config=CONFIG,
    )
    plans = {plan.algorithm: plan for plan in explanation.candidates} | {AS_CHOSEN: explanation.chosen}
    if variant not in plans:
        return None
    plan = plans[variant]
    step = simulate_step(LINK, plan, world, STEP, group_of_rank=groups, max_in_flight=in_flight)
    return {
        "variant": variant,
        "algorithm": plan.algorithm,
        "chunks": plan.chunks,
        "in_flight": in_flight,
        "world": world,
        **asdict(step),
    }


def variant_name(row: Row) -> str:
    """ "ring, 1 in flight"; "as chosen"."""
    if row["variant"] == AS_CHOSEN:
        return AS_CHOSEN
    return f"{row['variant'].replace('_', '-')}, {row['in_flight']} in flight"


def simulate_fleet(worlds: list[int]) -> list[Row]:
    """One row a variant and world."""
    rows = []
    for variant, in_flight in VARIANTS:
        for world in worlds:
            row = simulate_variant(variant, in_flight, world)
            if row is not None:
                rows.append(row)
                print(f"{variant_name(row)}, {world} Macs", file=sys.stderr)
    return rows


def fleet_table(rows: list[Row]) -> str:
    """Variants down, worlds across: step / exposed / share of goodput, and of what was chosen which that is."""
    worlds = sorted({row["world"] for row in rows})
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        cell = f"{row['step_ms']:,.0f} / {row['exposed_ms']:,.0f} / {row['goodput_share']:.0%}"
        if row["variant"] == AS_CHOSEN:
            cell += f" {row['algorithm'].replace('_', '-')}" + (f" × {row['chunks']}" if row["chunks"] > 1 else "")
        cells.setdefault(variant_name(row), {})[row["world"]] = cell
    head = [f"{world:,} Macs" for world in worlds]
    lines = [f"| step ms / exposed ms / share of goodput | {' | '.join(head)} |", "| --- " * (len(worlds) + 1) + "|"]
    for name, values in cells.items():
        lines.append(f"| {name} | {' | '.join(values.get(world, '–') for world in worlds)} |")
    return "\n".join(lines)


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
        "link": LINK.model_dump() | {"segment_nbytes": CONFIG.segment_nbytes, "credit_nbytes": CONFIG.credit_nbytes},
        "step": asdict(STEP),
        "command": shlex.join(["python", *sys.argv]),
        "rows": rows,
    }
    (folder / "simulator-fleet.json").write_text(json.dumps(described, indent=1) + "\n")
    (folder / "simulator-fleet.svg").write_text(fleet_plot(rows))


def read_rows(files: list[Path], world: int | None = None) -> list[Row]:
    """The rows of result files, with the link profile and burst that each states; of one world where one is named."""
    results = [json.loads(file.read_text()) for file in files]
    rows = [
        {
            "link_profile": result.get("link_profile", "ethernet-10g"),
            "burst_nbytes": result.get("shaping", {}).get("burst_nbytes", 0),
        }
        | row
        for result in results
        for row in result["rows"]
    ]
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
