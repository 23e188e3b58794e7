"""Reads a job file: YAML whose every key keeps its line, so that an error can say where."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mccl_core.settings import FieldPath, Resolved, SettingsError, resolve
from mccl_ray.config import NAME_PATTERN, OF_ONE_HOST, JobSpec


@dataclass(frozen=True)
class YamlFile:
    """A mapping read from a file, and the line of each of its keys (the first line is 1)."""

    name: str
    values: Mapping[str, Any]
    lines: Mapping[FieldPath, int]


def read_yaml(path: Path) -> YamlFile:
    """Reads a YAML mapping.

    Raises:
        SettingsError: the file is missing, no YAML, no mapping, or holds a key twice; the text says in
        which line.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: is not UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SettingsError(f"{path}{line}: is not valid YAML: {error.problem}") from error
    if root is None:
        return YamlFile(str(path), {}, {})
    if not isinstance(root, yaml.MappingNode):
        raise SettingsError(f"{path}:{root.start_mark.line + 1}: must be a mapping of keys and values")
    lines: dict[FieldPath, int] = {}
    _find_lines(root, (), lines, path)
    return YamlFile(str(path), yaml.SafeLoader("").construct_document(root), lines)


def load_job(
    path: Path, *, environ: Mapping[str, str], arguments: Mapping[str, Any] | None = None
) -> Resolved[JobSpec]:
    """The job in `path` under the environment's MCCL_* and the arguments; all its paths made absolute.

    Raises:
        SettingsError: a key or value is wrong, or the script or the folder does not exist.
    """
    file = read_yaml(path)
    shared = {name: value for name, value in environ.items() if name.removeprefix("MCCL_").lower() not in OF_ONE_HOST}
    job = resolve(
        JobSpec,
        file=file.values,
        environ=shared,
        arguments=arguments,
        file_name=file.name,
        file_lines=file.lines,
    )
    spec = job.values
    folder = path.resolve().parent
    script = (folder / spec.script).resolve()
    if not script.is_file():
        raise SettingsError(f"script: there is no file {str(script)!r} ({job.sources['script']}); correct the path")
    workdir = (folder / spec.workdir).resolve() if spec.workdir else script.parent
    if not workdir.is_dir():
        raise SettingsError(
            f"workdir: there is no folder {str(workdir)!r} ({job.sources['workdir']}); correct the path"
        )
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")[:63]
    if job.sources["name"] == "default" and re.fullmatch(NAME_PATTERN, stem):
        spec = spec.model_copy(update={"name": stem})
    absolute = {"script": script, "workdir": workdir, "storage": Path.cwd() / spec.storage.expanduser()}
    return Resolved(values=spec.model_copy(update=absolute), sources=job.sources)


def _find_lines(node: yaml.MappingNode, path: FieldPath, lines: dict[FieldPath, int], file: Path) -> None:
    for key, value in node.value:
        here = (*path, str(key.value))
        line = key.start_mark.line + 1
        if here in lines:
            raise SettingsError(f"{'.'.join(here)}: given twice ({file}:{lines[here]} and {line}); remove one")
        lines[here] = line
        if isinstance(value, yaml.MappingNode):
            _find_lines(value, here, lines, file)
