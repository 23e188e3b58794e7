"""Writes docs/api.md from docstrings, and docs/environment.md from the configuration's fields.

python tools/document.py            # writes both
python tools/document.py --check    # exits with 1, and names them, where they are not up to date
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import mccl_core  # noqa: F401  (makes `import mccl` possible)
from mccl_core.config import CoreConfig
from mccl_core.variables import ALIASES, REPLACED
from mccl_ray.config import OF_ONE_HOST, CheckpointSpec, JobSpec

DOCS = Path(__file__).parents[1] / "docs"
COMMAND = "python tools/document.py"

ALL = ("*",)  # what the module's __all__ names
API: dict[str, tuple[str, ...]] = {
    "mccl_core": ALL,
    "mccl_core.flight": ("FlightEntry",),
    "mccl_core.metrics": ("Metrics", "OpMetrics", "AlgorithmMetrics"),
    "mccl_core.planning": ("Explanation", "Candidate"),
    "mccl_core.links": ("LinkProfile", "load"),
    "mccl_core.settings": ("SettingsError",),
    "mccl_core.simulation": ("simulate_all_reduces", "simulate_step", "Backward", "StepPrediction"),
    "mccl_core.tuning": ("measure", "fit", "Tuning", "Point"),
    "mccl": ALL,
    "mccl_lightning": (),
    "mccl_lightning.config": ("LightningConfig",),
    "mccl_ray": (),
    "mccl_ray.backend": ("MCCLConfig",),
    "mccl_ray.config": ("JobSpec", "CheckpointSpec"),
}
"""What users call: module → names. Everything else may change without notice."""


def api() -> str:
    """The text of docs/api.md."""
    parts = [
        "# API",
        f"Made by `{COMMAND}` from the docstrings; change those, not this page. Variables are in "
        "[environment.md](environment.md).",
    ]
    told: dict[int, str] = {}
    for name, wanted in API.items():
        module = importlib.import_module(name)
        parts += [f"## {name}", markdown(documentation(module, name))]
        for item in names_of(module) if wanted == ALL else wanted:
            value = getattr(module, item)
            if id(value) in told:
                parts += [f"### {item}", f"As [`{told[id(value)]}.{item}`](#{item.lower()})."]
                continue
            told[id(value)] = name
            parts += list(entry(item, value))
    return "\n\n".join(parts) + "\n"


def names_of(module: ModuleType) -> list[str]:
    """What a module exports, but for its version."""
    return [name for name in module.__all__ if not name.startswith("_")]


def entry(name: str, value: Any) -> Iterator[str]:
    """One function or class."""
    yield f"### {name}"
    text = documentation(value, name)
    if inspect.isclass(value):
        base = next((b.__name__ for b in value.__bases__ if issubclass(b, Exception)), None)
        yield f"```python\nclass {name}{f'({base})' if base else ''}\n```"
        yield markdown(text)
        rows = list(fields(value))
        for field, *_, text in rows:
            if not text:
                raise SystemExit(f"{name}.{field.strip('`')} is part of the API and has no docstring")
        if rows and not any(default for _, _, default, _ in rows):
            yield table(("field", "type", ""), [(field, kind, text) for field, kind, _, text in rows])
        elif rows:
            yield table(("field", "type", "default", ""), rows)
        return
    signature = re.sub(r"<function <lambda> at \w+>", "...", str(inspect.signature(value)).replace("'", ""))
    yield f"```python\n{wrapped(f'{name}{signature}')}\n```"
    yield markdown(text)


def documentation(value: Any, name: str) -> str:
    """The docstring of its own.

    Raises:
        SystemExit: there is none.
    """
    text = value.__dict__.get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    if not text:
        raise SystemExit(f"{name} is part of the API and has no docstring")
    return inspect.cleandoc(text)


def wrapped(signature: str) -> str:
    """A long signature with one parameter a line."""
    if len(signature) <= 100:
        return signature
    head, rest = signature.split("(", 1)
    inner, tail = rest.rsplit(") ->", 1)
    # Commas within brackets belong to types.
    parameters = re.split(r", (?![^\[(]*[\])])", inner)
    return head + "(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + f") ->{tail}"


def markdown(docstring: str) -> str:
    """A docstring whose sections (Args, Returns, Raises) become lists."""
    lines: list[str] = []
    section = ""
    for line in docstring.splitlines():
        title = re.fullmatch(r"(Args|Returns|Raises):", line)
        if title:
            section = title[1]
            lines += [f"**{section}**", ""]
        elif not section or not line.strip():
            lines.append(line)
        elif not line.startswith(" "):
            section = ""
            lines.append(line)
        elif section != "Returns" and not line.startswith(" " * 8):
            item, text = line.strip().split(":", 1)
            lines.append(f"- `{item}`:{text}")
        else:
            lines.append(f"  {line.strip()}" if section != "Returns" else line.strip())
    return "\n".join(lines).strip()


def fields(owner: type) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of a class's public fields."""
    texts = attribute_docstrings(owner)
    if issubclass(owner, BaseModel):
        for name, info in owner.model_fields.items():
            text = info.description or texts.get(name, "")
            yield f"`{name}`", type_of(info), default_of(info), one_line(text)
        return
    defaults = {f.name: f.default for f in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else {}
    for name, annotation in inspect.get_annotations(owner).items():
        default = defaults.get(name, dataclasses.MISSING)
        shown = "" if default is dataclasses.MISSING else f"`{default!r}`"
        yield f"`{name}`", f"`{name_of_type(annotation)}`".replace("|", r"\|"), shown, one_line(texts.get(name, ""))


def attribute_docstrings(owner: type) -> dict[str, str]:
    """The strings below the fields of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            texts[field.target.id] = inspect.cleandoc(str(after.value.value))
    return texts


def name_of_type(annotation: Any) -> str:
    """A type as one would write it."""
    if isinstance(annotation, str):
        return annotation
    forward = getattr(annotation, "__forward_arg__", None)  # of a TypedDict
    if forward:
        return str(forward)
    return annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)


def type_of(info: FieldInfo) -> str:
    """What may be given for a field, with its range."""
    annotation = info.annotation
    if get_origin(annotation) is not None and type(None) in get_args(annotation):
        rest = [a for a in get_args(annotation) if a is not type(None)]
        annotation = rest[0] if len(rest) == 1 else Union[tuple(rest)]  # noqa: UP007
    if get_origin(annotation) is Literal:
        return " ".join(f"`{value}`" for value in get_args(annotation))
    bounds = {name: getattr(m, name) for m in info.metadata for name in ("ge", "gt", "le") if hasattr(m, name)}
    least, above, most = (bounds.get(name) for name in ("ge", "gt", "le"))
    if annotation is SecretStr:
        annotation = str
    name = f"`{name_of_type(annotation)}`".replace("|", r"\|").replace("pathlib.", "")
    if least is not None and most is not None:
        return f"{name}, {least} to {most}"
    if above is not None:
        return f"{name}, above {above}" + (f", at most {most}" if most is not None else "")
    return name if least is None else f"{name}, {least} or more"


def default_of(info: FieldInfo) -> str:
    """A field's default; of one that is computed, how."""
    if info.default_factory is not None:
        return f"from `{getattr(info.default_factory, '__name__', info.default_factory)}()`"
    if info.default is PydanticUndefined:
        return "required"
    if isinstance(info.default, BaseModel):
        return "its own"
    return "unset" if info.default is None else f"`{info.default if info.default != '' else repr('')}`"


def one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def environment() -> str:
    """The text of docs/environment.md."""
    core = []
    for name, info in CoreConfig.model_fields.items():
        variables = [f"MCCL_{name.upper()}", *(alias for alias, field in ALIASES.items() if field == name)]
        shown = "<br>".join(f"`{variable}`" for variable in variables)
        core.append((shown, type_of(info), default_of(info), one_line(info.description or "")))
    job = []
    for prefix, model in (("MCCL_", JobSpec), ("MCCL_CHECKPOINT_", CheckpointSpec)):
        texts = attribute_docstrings(model)
        for name, info in model.model_fields.items():
            if name not in ("core", "checkpoint"):
                text = info.description or texts.get(name, "")
                job.append((f"`{prefix}{name.upper()}`", type_of(info), default_of(info), one_line(text)))
    one_host = ", ".join(f"`{name}`" for name in sorted(OF_ONE_HOST))
    parts = [
        "# Variables",
        f"Made by `{COMMAND}` from [config.py](../mccl_core/config.py), [variables.py](../mccl_core/variables.py) and "
        "[mccl_ray/config.py](../mccl_ray/config.py); change those, not this page.",
        "A value is taken from the first of: an argument (`mccl.init(...)`, an option of the command), the variable, a "
        "file (`core:` in a job file), the default. `mccl-fleet config show job.yaml` prints each with where it came "
        "from. A value out of range is an error that names the variable. A `MCCL_*` variable that does nothing is "
        "told once, by one rank of each machine.",
        "## The process group",
        "Every one is also a key under `core:` in a job file, by its name in lower case without `MCCL_`, but for "
        f"those of one machine: {one_host}. Where two names are given, the second is what other guides call it; the "
        "first wins.",
        table(("variable", "values", "default", ""), core),
        "## A job of `mccl-fleet submit`",
        "Each is also a key of the job file.",
        table(("variable", "values", "default", ""), job),
        "`MCCL_FLEET_ADDRESS`, `MCCL_FLEET_LOCAL_MACS` and `MCCL_FLEET_PROFILE` say where the command finds its fleet; "
        "other names that begin with `MCCL_FLEET_` pass between a worker and its script.",
        "## Variables of other guides that mean nothing here",
        table(("variable", "instead"), [(f"`{name}`", one_line(text)) for name, text in sorted(REPLACED.items())]),
    ]
    return "\n\n".join(parts) + "\n"


PAGES = {DOCS / "api.md": api, DOCS / "environment.md": environment}


def stale() -> list[Path]:
    """The pages that are not what they should be."""
    return [path for path, text in PAGES.items() if not path.exists() or path.read_text() != text()]


def main() -> None:
    """Parses, writes or checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    old = stale()
    if arguments.check and old:
        sys.exit(f"not up to date: {', '.join(path.name for path in old)}; run `{COMMAND}`")
    for path in old:
        path.write_text(PAGES[path]())


if __name__ == "__main__":
    main()
