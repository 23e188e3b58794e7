"""The pages that are made from docstrings and fields: they are up to date, and say what the sources say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools/document.py"


@pytest.fixture(scope="module")
def document() -> ModuleType:
    spec = importlib.util.spec_from_file_location("document", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, TOOL, "--check"], capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_stale_page_is_named_and_mended(
    document: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(document, "PAGES", {page: lambda: "new"})
    for before in (None, "old"):
        if before is not None:
            page.write_text(before)
        monkeypatch.setattr(sys, "argv", ["document.py", "--check"])
        with pytest.raises(SystemExit, match=r"not up to date: page\.md; run `python tools/document\.py`"):
            document.main()
        monkeypatch.setattr(sys, "argv", ["document.py"])
        document.main()
        assert page.read_text() == "new"


def test_sections_of_a_docstring_become_lists(document: ModuleType) -> None:
    text = (
        "Does it.\n\nArgs:\n    first: of all\n        things.\n    second: more.\n\nReturns:\n    What came.\n\n"
        "Raises:\n    ValueError: too bad."
    )
    assert document.markdown(text) == (
        "Does it.\n\n**Args**\n\n- `first`: of all\n  things.\n- `second`: more.\n\n**Returns**\n\nWhat came.\n\n"
        "**Raises**\n\n- `ValueError`: too bad."
    )


class Undocumented:
    pass


class HalfDocumented:
    """A class."""

    field: int


@pytest.mark.parametrize(("value", "name"), [(Undocumented, "X"), (HalfDocumented, r"X\.field"), (lambda: 0, "X")])
def test_what_has_no_docstring_is_refused(document: ModuleType, value: object, name: str) -> None:
    with pytest.raises(SystemExit, match=f"^{name} is part of the API and has no docstring"):
        list(document.entry("X", value))
