"""Configuration with a memory: default < file < environment < argument, and where each value came from.

Every layer owns one frozen pydantic model; this module fills it and knows nothing about its fields.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_origin

import yaml
from pydantic import BaseModel, ValidationError

M = TypeVar("M", bound=BaseModel)
FieldPath = tuple[str, ...]


class SettingsError(ValueError):
    """One or more values cannot be used; each line of the text names field, value, source and remedy."""


@dataclass(frozen=True)
class EnvironmentPrefix:
    """Annotation of a nested model's field: its variables start with `prefix`, not with the field's name."""

    prefix: str


@dataclass(frozen=True)
class Resolved(Generic[M]):
    """A validated model, and the source of each of its fields.

    `sources` maps a dotted field ("checkpoint.keep") to "default", "file job.yaml:12", "environment MCCL_X"
    or "argument".
    """

    values: M
    sources: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Yields (dotted field, value, source) in the order in which the models declare the fields."""
        for dotted, source in self.sources.items():
            value: Any = self.values
            for name in dotted.split("."):
                value = getattr(value, name)
            yield dotted, value, source


@dataclass(frozen=True)
class _Inputs:
    """What does not change while the nested models are walked."""

    environ: Mapping[str, str]
    file_name: str
    file_lines: Mapping[FieldPath, int]

    def file_source(self, path: FieldPath) -> str:
        line = self.file_lines.get(path)
        return f"file {self.file_name}" + (f":{line}" if line else "")


def resolve(
    model: type[M],
    *,
    file: Mapping[str, Any] | None = None,
    environ: Mapping[str, str],
    arguments: Mapping[str, Any] | None = None,
    prefix: str = "MCCL_",
    file_name: str = "file",
    file_lines: Mapping[FieldPath, int] | None = None,
) -> Resolved[M]:
    """Fills `model` from its defaults, `file`, `environ` (MCCL_<FIELD>) and `arguments`; the last wins.

    A variable for a list or a mapping holds it as YAML.

    A field that is itself a model is filled the same way, from MCCL_<FIELD>_<INNER FIELD> unless it is
    annotated with an `EnvironmentPrefix`. A model's class variable `environment_aliases` maps other names of
    variables to its fields; a field's own variable wins over them. `file_name` and `file_lines` (path of a key →
    its line) serve the messages only.

    Raises:
        SettingsError: a key is unknown or a value is out of range; all such problems are listed.
    """
    inputs = _Inputs(environ, file_name, file_lines or {})
    sources: dict[str, str] = {}
    problems: list[str] = []
    data = _collect(model, (), prefix, file or {}, arguments or {}, inputs, sources, problems)
    try:
        values = model.model_validate(data)
    except ValidationError as error:
        problems += [_describe(entry, sources) for entry in error.errors(include_url=False)]
    if problems:
        raise SettingsError("\n".join(problems))
    return Resolved(values=values, sources=sources)


def _collect(
    model: type[BaseModel],
    path: FieldPath,
    prefix: str,
    file: Mapping[str, Any],
    arguments: Mapping[str, Any],
    inputs: _Inputs,
    sources: dict[str, str],
    problems: list[str],
) -> dict[str, Any]:
    """Returns the values to validate for `model`, and records a source for each of its fields."""
    for key in [*file, *arguments]:
        if key not in model.model_fields:
            problems.append(_unknown_key(str(key), path, model, inputs, in_file=key in file))
    data: dict[str, Any] = {}
    aliases: Mapping[str, str] = getattr(model, "environment_aliases", {})
    for name, field in model.model_fields.items():
        here = (*path, name)
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            inner_prefix = next(
                (m.prefix for m in field.metadata if isinstance(m, EnvironmentPrefix)),
                f"{prefix}{name.upper()}_",
            )
            given = file.get(name) if file.get(name) is not None else {}
            if not isinstance(given, Mapping):
                keys = ", ".join(nested.model_fields)
                where = inputs.file_source(here)
                problems.append(f"{'.'.join(here)}: {given!r} ({where}) must be a mapping of {keys}")
                continue
            inner = arguments.get(name) or {}
            data[name] = _collect(nested, here, inner_prefix, given, inner, inputs, sources, problems)
            continue
        variables = [f"{prefix}{name.upper()}", *(alias for alias, field in aliases.items() if field == name)]
        variable = next((v for v in variables if v in inputs.environ), None)
        source = "default"
        if name in file:
            data[name], source = file[name], inputs.file_source(here)
        if variable is not None:
            data[name], source = _read(inputs.environ[variable], nested), f"environment {variable}"
        if arguments.get(name) is not None:
            data[name], source = arguments[name], "argument"
        sources[".".join(here)] = source
    return data


def _read(text: str, annotation: Any) -> Any:
    """A variable's text as a value: a list or a mapping is written as in YAML; pydantic reads all others."""
    if get_origin(annotation) not in (tuple, dict):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _unknown_key(key: str, path: FieldPath, model: type[BaseModel], inputs: _Inputs, *, in_file: bool) -> str:
    source = inputs.file_source((*path, key)) if in_file else "argument"
    close = difflib.get_close_matches(key, model.model_fields, n=1)
    remedy = f"did you mean {close[0]!r}?" if close else f"the keys are {', '.join(model.model_fields)}"
    return f"{'.'.join((*path, key))}: unknown key ({source}); {remedy}"


# Of errors whose text speaks of Python's types.
_WORDS = {
    "tuple_type": "should be a list, as in [--epochs, 3]",
    "dict_type": "should be a mapping, as in {NAME: value}",
}


def _describe(entry: Any, sources: Mapping[str, str]) -> str:
    """One line for one pydantic error: field, value, allowed range, source, what to do."""
    names = [str(part) for part in entry["loc"]]
    message = _WORDS.get(entry["type"], entry["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    if not names:  # a check of several fields names them itself
        return str(message)
    owner = names
    while owner and ".".join(owner) not in sources:
        owner = owner[:-1]
    source = sources.get(".".join(owner), "file")
    if entry["type"] == "missing":
        return f"{'.'.join(names)}: a value is required; add the key {names[-1]!r}"
    remedy = "set it" if source == "default" else f"correct it in {source.removeprefix('file ')}"
    given = entry["input"]
    # Of a mapping the keys suffice: its values may be nobody's business.
    value = f"{{{', '.join(map(str, given))}}}" if isinstance(given, Mapping) else repr(given)
    return f"{'.'.join(names)}: {value} ({source}) {message}; {remedy}"
