"""The self-test's report: one JSON file for programs, one page of text for people."""

from __future__ import annotations

import json
import textwrap
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Status = Literal["passed", "failed", "not_run"]
_MARKS = {"passed": "ok    ", "failed": "FAILED", "not_run": "not run"}
_WIDTH = 100


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Check(_Model):
    """One thing that was looked at."""

    name: str = Field(description="A short name, stable between versions.")
    claim: str = Field(description="What holds where the check has passed.")
    status: Status
    reason: str = Field("", description="Why it failed, or was not run.")
    seconds: float = Field(ge=0, description="How long it took.")
    figures: dict[str, float | int | str | bool] = Field(
        default_factory=dict, description="What was measured; units are in the names."
    )


class Machine(_Model):
    """Where the report is from. It holds no host name, user name or address."""

    system: str = Field(description="Operating system and its version.")
    processor: str = Field(description="What the system calls its processor.")
    core_count: int = Field(ge=1)
    memory_nbytes: int = Field(ge=0, description="Physical memory; 0 where the system does not tell.")
    python: str
    torch: str
    mccl_fleet: str = Field(description="Version of this package.")
    mps_available: bool = Field(description="Whether torch can use an Apple GPU here.")


class Report(_Model):
    """A whole run."""

    format_version: Literal[1] = 1
    created: str = Field(description="UTC, as 2026-01-31T12:00:00Z.")
    device: Literal["cpu", "mps"] = Field(description="Where the tensors of the checks were.")
    quick: bool = Field(description="Whether sizes and counts were cut down.")
    machine: Machine
    checks: list[Check]

    @property
    def failed(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if check.status == "failed"]

    def to_json(self) -> str:
        """The report as a file holds it; `json_schema()` describes it."""
        return self.model_dump_json(indent=2) + "\n"

    def to_text(self) -> str:
        """The report as a page of text."""
        m = self.machine
        lines = [
            f"mccl-fleet {m.mccl_fleet} self-test, {self.created}, tensors on {self.device}",
            f"{m.system}, {m.processor}, {m.core_count} cores, {m.memory_nbytes / 2**30:.0f} GiB; "
            f"Python {m.python}, torch {m.torch}",
            "",
        ]
        for check in self.checks:
            lines.append(f"{_MARKS[check.status]}  {check.name} ({check.seconds:.1f} s): {check.claim}")
            figures = ", ".join(f"{name} {_number(value)}" for name, value in check.figures.items())
            for note in (figures, check.reason):
                indent = " " * 8
                lines += [textwrap.indent(line, indent) for line in textwrap.wrap(note, _WIDTH - len(indent))]
        counts = {status: sum(check.status == status for check in self.checks) for status in _MARKS}
        lines += ["", f"{counts['passed']} passed, {counts['failed']} failed, {counts['not_run']} not run"]
        return "\n".join(lines) + "\n"


def json_schema() -> str:
    """The JSON Schema of a report, as docs/self-test.schema.json has it."""
    schema: dict[str, Any] = Report.model_json_schema(mode="serialization")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2) + "\n"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
