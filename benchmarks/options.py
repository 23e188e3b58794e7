"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from measure import COLUMNS, Row

MAX_IN_FLIGHT = 1024


def whole(least: int, most: int, unit: str = "") -> Callable[[str], int]:
    """A whole number within a range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number between {least} and {most}{unit}")
        return value

    return parse


def positive(unit: str) -> Callable[[str], float]:
    """A number above 0."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {unit} above 0")
        return value

    return parse


def tensor_nbytes(text: str) -> int:
    """The size of a float32 tensor."""
    value = whole(4, 2**34, " bytes")(text)
    if value % 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not a multiple of 4: tensors are of float32")
    return value


def new_file(text: str) -> Path:
    """A file that can be written when the measuring is over."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {path.parent} is no folder, or it is one itself")
    return path


def make_parser(description: str, sizes: list[int]) -> argparse.ArgumentParser:
    """A parser with the options that all programs have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=tensor_nbytes, nargs="+", default=sizes, help="bytes of the tensors")
    parser.add_argument(
        "--in-flight",
        type=whole(1, MAX_IN_FLIGHT),
        default=1,
        help="all-reduces, each of its own tensor, that are started before the first is waited for",
    )
    parser.add_argument(
        "--seconds", type=positive("seconds"), default=2.0, help="measuring time for one point and backend"
    )
    parser.add_argument("--commit", help="the commit that the result states, for a copy without its .git")
    parser.add_argument("--output", type=new_file, help="write the result as JSON to this file")
    parser.add_argument("--markdown", action="store_true", help="print a table instead of JSON")
    return parser


def tell(arguments: argparse.Namespace, result: dict[str, object], rows: list[Row], *, left_out: set[str]) -> None:
    """Writes and prints what the options ask for; the table has all columns but those in `left_out`."""
    text = json.dumps(result | {"rows": rows}, indent=2)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    if not arguments.markdown:
        print(text)
        return
    columns = {title: cell for title, cell in COLUMNS.items() if title not in left_out}
    lines = [list(columns), ["---"] * len(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    print("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
