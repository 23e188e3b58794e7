"""Job files: lines in errors, paths, what a job may not hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from mccl_core.settings import SettingsError
from mccl_ray.jobfile import load_job, read_yaml

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def job(tmp_path: Path):
    """Writes a job file beside a script and returns its path."""
    (tmp_path / "train.py").touch()

    def write(text: str) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return path

    return write


def test_paths_become_absolute_and_the_file_names_the_job(job, tmp_path: Path) -> None:
    spec = load_job(job("script: train.py\nargs: [--lr, 0.1]\nenv: {DEPTH: 3}\n"), environ={}).values
    assert spec.script == tmp_path / "train.py"
    assert spec.workdir == tmp_path
    assert spec.storage == Path.cwd() / "runs"
    assert spec.name == "job"
    assert spec.args == ("--lr", "0.1")
    assert spec.env == {"DEPTH": "3"}


@pytest.mark.parametrize(("file", "name"), [("my job (2).yaml", "my-job-2"), ("über.yaml", "ber"), ("+.yaml", "job")])
def test_a_files_name_becomes_one_that_a_job_may_have(job, tmp_path: Path, file: str, name: str) -> None:
    path = job("script: train.py\n").rename(tmp_path / file)
    assert load_job(path, environ={}).values.name == name


def test_variables_hold_lists_and_mappings_as_yaml(job) -> None:
    environ = {"MCCL_ARGS": "[--epochs, 3]", "MCCL_ENV": "{DEPTH: 3}"}
    spec = load_job(job("script: train.py\nargs: [--lr, 1]\n"), environ=environ).values
    assert (spec.args, spec.env) == (("--epochs", "3"), {"DEPTH": "3"})
    with pytest.raises(SettingsError, match=r"args: '--epochs' \(environment MCCL_ARGS\) should be a list, as in"):
        load_job(job("script: train.py\n"), environ={"MCCL_ARGS": "--epochs"})


def test_the_folder_may_lie_above_the_script(job, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "t.py").touch()
    spec = load_job(job("script: code/t.py\nworkdir: .\n"), environ={}).values
    assert (spec.script, spec.workdir) == (tmp_path / "code" / "t.py", tmp_path)


def test_the_environment_and_the_arguments_stand_over_the_file(job) -> None:
    path = job("script: train.py\nworkers: 2\nmax_failures: 1\n")
    environ = {"MCCL_WORKERS": "3", "MCCL_MAX_FAILURES": "5", "MCCL_SEGMENT_NBYTES": "65536"}
    read = load_job(path, environ=environ, arguments={"workers": 4})
    assert (read.values.workers, read.sources["workers"]) == (4, "argument")
    assert (read.values.max_failures, read.sources["max_failures"]) == (5, "environment MCCL_MAX_FAILURES")
    assert read.values.core_environ() == {"MCCL_SEGMENT_NBYTES": "65536"}


def test_what_belongs_to_one_host_is_not_taken_from_this_one(job) -> None:
    environ = {"MCCL_SECRET": "s" * 32, "MCCL_HOST_NAME": "here", "MCCL_LISTEN_ADDR": "10.0.0.1"}
    spec = load_job(job("script: train.py\n"), environ=environ).values
    assert spec.core_environ() == {}
    assert "s" * 32 not in spec.model_dump_json()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("script: train.py\n\nworkrs: 2\n", "workrs: unknown key (file {file}:3); did you mean 'workers'?"),
        (
            "script: train.py\ncheckpoint:\n  kep: 2\n",
            "checkpoint.kep: unknown key (file {file}:3); did you mean 'keep'?",
        ),
        (
            "script: train.py\nworkers: 0\n",
            "workers: 0 (file {file}:2) should be greater than or equal to 1; correct it in {file}:2",
        ),
        (
            "script: train.py\nargs: --epochs 3\n",
            "args: '--epochs 3' (file {file}:2) should be a list, as in [--epochs, 3]; correct it in {file}:2",
        ),
        (
            "script: train.py\nenv: DEPTH=3\n",
            "env: 'DEPTH=3' (file {file}:2) should be a mapping, as in {{NAME: value}}; correct it in {file}:2",
        ),
        ("workers: 1\n", "script: a value is required; add the key 'script'"),
        (
            "script: other.py\n",
            "script: there is no file '{folder}/other.py' (file {file}:1); correct the path",
        ),
        (
            "script: train.py\nworkdir: x\n",
            "workdir: there is no folder '{folder}/x' (file {file}:2); correct the path",
        ),
        ("script: train.py\nscript: b.py\n", "script: given twice ({file}:1 and 2); remove one"),
        ("script: [train.py\n", "{file}:2: is not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("- script\n", "{file}:1: must be a mapping of keys and values"),
        (
            "script: train.py\nenv:\n  MCCL_SECRET: x\n",
            "env: {{MCCL_SECRET}} (file {file}:2) must not hold MCCL_SECRET: a job's description is not "
            "secret. Write it to a file of mode 0600 on each Mac and name that in MCCL_SECRET_FILE; "
            "correct it in {file}:2",
        ),
        (
            "script: train.py\ncore:\n  listen_addr: 10.0.0.1\n",
            "must not hold listen_addr, which belongs to one Mac: set MCCL_LISTEN_ADDR there",
        ),
    ],
)
def test_an_error_says_where_and_what_to_do(job, tmp_path: Path, text: str, expected: str) -> None:
    path = job(text)
    with pytest.raises(SettingsError) as error:
        load_job(path, environ={})
    assert expected.format(file=path, folder=tmp_path) in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no\.yaml: cannot be read: No such file"):
        read_yaml(tmp_path / "no.yaml")
