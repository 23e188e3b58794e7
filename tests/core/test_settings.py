"""Values, their sources and their errors."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import BaseModel, ConfigDict, Field

from mccl_core.settings import EnvironmentPrefix, SettingsError, resolve


class Inner(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    keep: int = Field(2, ge=1)


class Outer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    workers: int = Field(1, ge=1, le=10)
    name: str = "job"
    inner: Inner = Inner()
    core: Annotated[Inner, EnvironmentPrefix("MCCL_")] = Inner()


LINES = {("workers",): 3, ("inner", "keep"): 5, ("wrkers",): 7}


def test_each_source_beats_the_ones_before_it() -> None:
    file = {"workers": 2, "inner": {"keep": 3}}
    environ = {"MCCL_WORKERS": "4", "MCCL_INNER_KEEP": "5", "MCCL_KEEP": "6", "OTHER": "9"}
    read = resolve(Outer, file=file, environ={}, file_name="job.yaml", file_lines=LINES)
    assert (read.values.workers, read.sources["workers"]) == (2, "file job.yaml:3")
    assert (read.values.name, read.sources["name"]) == ("job", "default")
    over = resolve(Outer, file=file, environ=environ)
    assert (over.values.workers, over.sources["workers"]) == (4, "environment MCCL_WORKERS")
    assert (over.values.inner.keep, over.sources["inner.keep"]) == (5, "environment MCCL_INNER_KEEP")
    assert (over.values.core.keep, over.sources["core.keep"]) == (6, "environment MCCL_KEEP")
    last = resolve(Outer, file=file, environ=environ, arguments={"workers": 7, "name": None})
    assert (last.values.workers, last.sources["workers"]) == (7, "argument")
    assert last.sources["name"] == "default"


def test_rows_come_in_the_order_of_the_fields() -> None:
    rows = list(resolve(Outer, environ={}).rows())
    assert [row[0] for row in rows] == ["workers", "name", "inner.keep", "core.keep"]
    assert rows[2] == ("inner.keep", 2, "default")


@pytest.mark.parametrize(
    ("file", "environ", "expected"),
    [
        ({"wrkers": 2}, {}, "wrkers: unknown key (file job.yaml:7); did you mean 'workers'?"),
        ({"zzz": 2}, {}, "zzz: unknown key (file job.yaml); the keys are workers, name, inner, core"),
        (
            {"workers": 0},
            {},
            "workers: 0 (file job.yaml:3) should be greater than or equal to 1; correct it in job.yaml:3",
        ),
        (
            {},
            {"MCCL_WORKERS": "many"},
            "workers: 'many' (environment MCCL_WORKERS) should be a valid integer, unable to parse string "
            "as an integer; correct it in environment MCCL_WORKERS",
        ),
        ({"inner": 3}, {}, "inner: 3 (file job.yaml) must be a mapping of keep"),
        (
            {"inner": {"keep": 0}},
            {},
            "inner.keep: 0 (file job.yaml:5) should be greater than or equal to 1; correct it in job.yaml:5",
        ),
    ],
)
def test_an_error_names_field_value_source_and_remedy(
    file: dict[str, object], environ: dict[str, str], expected: str
) -> None:
    with pytest.raises(SettingsError) as error:
        resolve(Outer, file=file, environ=environ, file_name="job.yaml", file_lines=LINES)
    assert str(error.value) == expected


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(SettingsError) as error:
        resolve(Outer, file={"wrkers": 2, "workers": 11}, environ={})
    assert len(str(error.value).splitlines()) == 2
