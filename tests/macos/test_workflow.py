"""The workflow for macOS runners: it parses, and its matrix is what `make macos` builds for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


def jobs() -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / "macos.yml").read_text())["jobs"]


def test_wheels_and_tests_cover_the_releases_that_are_cross_compiled() -> None:
    source = (ROOT / "tools" / "macos" / "__main__.py").read_text()
    listed = re.search(r"^TORCH_VERSIONS = \((.*)\)$", source, re.MULTILINE)
    assert listed is not None
    versions = re.findall(r'"([\d.]+)"', listed[1])
    assert len(versions) == 3
    for job in ("wheels", "tests"):
        assert jobs()[job]["strategy"]["matrix"]["torch"] == versions


def test_each_command_of_the_project_in_it_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for job in jobs().values():
        for step in job["steps"]:
            for target in re.findall(r"\bmake (\w+)", step.get("run", "")):
                assert f"\n{target}:" in makefile
            for path in re.findall(r"\btests/\S+", step.get("run", "")):
                assert (ROOT / path).exists()


def test_the_report_is_kept_also_where_tests_fail() -> None:
    steps = jobs()["tests"]["steps"]
    made = next(i for i, step in enumerate(steps) if "--self-test --report report.json" in step.get("run", ""))
    kept = next(i for i, step in enumerate(steps) if step.get("with", {}).get("path") == "report.json")
    assert made < kept
    for step in (steps[made], steps[kept]):
        assert step["if"] == "${{ !cancelled() }}"
