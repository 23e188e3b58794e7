"""The simulator's program: fitting a link, the fleet's table and plot."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = BENCHMARKS / "simulate.py"


@pytest.fixture
def link_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/link_model.py."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import link_model

    return link_model


@pytest.fixture
def line_chart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/line_chart.py."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import line_chart

    return line_chart


def rows_of(model: Any, world: int) -> list[dict[str, Any]]:
    """What a benchmark would measure on exactly this link."""
    rows = [{"world": world, "bytes": 4**k, "in_flight": 1 + k % 2} for k in range(5, 12)]
    return [row | {"mccl_ms": model.predict_ms(row)} for row in rows]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the program."""
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_fit_finds_the_link_that_made_the_rows(link_model: ModuleType) -> None:
    truth = link_model.LinkModel(alpha_s=120e-6, goodput_bytes_per_s=0.8e9)
    found = link_model.fit(rows_of(truth, 4))
    assert found.alpha_s == pytest.approx(truth.alpha_s, rel=0.01)
    assert found.goodput_bytes_per_s == pytest.approx(truth.goodput_bytes_per_s, rel=0.01)


def test_a_fit_refuses_rows_that_cannot_tell(link_model: ModuleType) -> None:
    row = {"world": 4, "bytes": 1024, "mccl_ms": 1.0}
    with pytest.raises(ValueError, match=r"one world, got worlds \[4, 8\]"):
        link_model.fit([row, row | {"world": 8}])
    with pytest.raises(ValueError, match="two sizes"):
        link_model.fit([row, row])
    with pytest.raises(ValueError, match="two ranks"):
        link_model.fit([row | {"world": 1}])


def test_predictions_of_another_world_are_printed_with_their_error(link_model: ModuleType, tmp_path: Path) -> None:
    truth = link_model.LinkModel(alpha_s=120e-6, goodput_bytes_per_s=0.8e9)
    rows = rows_of(truth, 4) + rows_of(truth, 6)
    rows[-1]["mccl_ms"] *= 2  # the model must be off by half there, and nowhere else
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"rows": rows}))
    done = run("--fit", results, "--world", 4, "--predict", results)
    assert done.returncode == 0, done.stderr
    predicted = [line for line in done.stdout.splitlines() if line.startswith("| 6 ")]
    errors = [float(line.split("|")[-2].rstrip(" %")) for line in predicted]
    assert len(errors) == 7
    assert errors[:-1] == pytest.approx([0.0] * 6, abs=1.0)
    assert errors[-1] == pytest.approx(-50.0, abs=1.0)


def test_a_row_takes_the_algorithm_that_its_link_profile_chooses(link_model: ModuleType) -> None:
    model = link_model.LinkModel(alpha_s=306e-6, goodput_bytes_per_s=1.238e9)
    row = {"world": 8, "bytes": 256 * 1024}
    # On loopback bytes count for more than rounds, so that circulant is chosen and not recursive doubling.
    assert model.predict_ms(row | {"link_profile": "loopback"}) > model.predict_ms(row)
    assert model.predict_ms(row | {"link_profile": "ethernet-10g"}) == model.predict_ms(row)
    fields = {"latency_us": 10, "step_us": 20, "goodput_GBps": 3, "circulant_share": 0.9}  # those of loopback
    assert model.predict_ms(row | {"link_profile": fields}) == model.predict_ms(row | {"link_profile": "loopback"})


def test_a_row_is_predicted_with_the_burst_of_its_file(link_model: ModuleType, tmp_path: Path) -> None:
    link = {"alpha_s": 120e-6, "goodput_bytes_per_s": 0.8e9}
    # Senders meet at the ports of a circulant; a bucket makes up for the time in which one idles.
    circulant = {"world": 8, "bytes": 1_000_000, "in_flight": 8}
    model = link_model.LinkModel(**link)
    shaped_ms = model.predict_ms(circulant | {"burst_nbytes": 2**21})
    assert shaped_ms < 0.99 * model.predict_ms(circulant)
    results = tmp_path / "results.json"
    rows = [row | {"mccl_ms": model.predict_ms(row | {"burst_nbytes": 2**21})} for row in rows_of(model, 4)]
    rows.append(circulant | {"mccl_ms": shaped_ms})
    results.write_text(json.dumps({"rows": rows, "shaping": {"burst_nbytes": 2**21}}))
    done = run("--fit", results, "--world", 4, "--predict", results)
    assert done.returncode == 0, done.stderr
    (predicted,) = [line for line in done.stdout.splitlines() if line.startswith("| 8 ")]
    assert float(predicted.split("|")[-2].rstrip(" %")) == pytest.approx(0.0, abs=0.5)


@pytest.mark.slow
def test_four_ranks_predict_what_eight_measured() -> None:
    results = BENCHMARKS / "results"
    eight = [results / "shaped-10gbit-8.json", results / "shaped-10gbit-8-in-flight.json"]
    done = run("--fit", results / "shaped-10gbit-4.json", "--predict", *eight)
    assert done.returncode == 0, done.stderr
    errors = [float(line.split("|")[-2].rstrip(" %")) for line in done.stdout.splitlines() if line.startswith("| 8 ")]
    assert len(errors) == 4
    assert max(map(abs, errors)) < 10


def test_the_fleet_is_written_into_the_page_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "simulator.md"
    page.write_text("before\n<!-- fleet: begin -->\nold\n<!-- fleet: end -->\nafter\n")
    done = run("--worlds", 4, 6, "--write", tmp_path)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.startswith("before\n<!-- fleet: begin -->\n| step ms")
    assert text.endswith("<!-- fleet: end -->\nafter\n")
    assert "old" not in text
    assert done.stdout.strip() in text
    rows = json.loads((tmp_path / "simulator-fleet.json").read_text())["rows"]
    assert {row["world"] for row in rows} == {4, 6}
    assert {row["variant"] for row in rows} >= {"ring", "circulant", "as chosen"}
    # Backward takes longer than the wire, so the last bucket alone is exposed.
    assert all(0 < row["exposed_ms"] < 1090 / 18 for row in rows)
    assert ElementTree.parse(tmp_path / "simulator-fleet.svg").getroot().tag.endswith("svg")


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "simulator.md"
    page.write_text("no marks\n")
    done = run("--worlds", 4, "--write", tmp_path)
    assert done.returncode == 1
    assert "lacks the marks" in done.stderr
    assert page.read_text() == "no marks\n"


def test_a_chart_draws_and_names_each_line(line_chart: ModuleType) -> None:
    series = {"a < b": [(1, 10.0), (10, 1000.0)], "c": [(1, 20.0), (10, 900.0)]}
    root = ElementTree.fromstring(line_chart.line_chart("title", "x, units", "y, units", series))
    name = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{name}polyline")) == 2
    texts = {text.text: float(text.get("y", "nan")) for text in root.findall(f"{name}text")}
    assert {"title", "x, units", "y, units", "a < b", "c", "1,000"} <= set(texts)
    assert abs(texts["a < b"] - texts["c"]) >= 15  # lines that end close together have names apart


def test_a_chart_of_one_number_of_macs_can_be_drawn(line_chart: ModuleType) -> None:
    chart = line_chart.line_chart("title", "Macs", "ms", {"ring": [(200, 10.0)]})
    assert "nan" not in chart
    ElementTree.fromstring(chart)
