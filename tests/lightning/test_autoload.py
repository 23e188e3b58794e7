"""Registration at the end of `import torch`, in processes that import nothing of this project."""

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from mccl_lightning import hooks
from mccl_lightning._autoload import LightningFinder, autoload

pytestmark = pytest.mark.timeout(120)

TRAINER = """
import sys
import {package} as pl
import torch
trainer = pl.Trainer(strategy="mccl_ddp", logger=False, enable_checkpointing=False, enable_progress_bar=False)
print("STRATEGY", trainer.strategy.strategy_name, "pydantic" in sys.modules)
"""


def test_import_torch_loads_neither_lightning_nor_pydantic(run_alone: Callable) -> None:
    code = (
        "import sys, torch\n"
        "heavy = {'pydantic', 'lightning', 'pytorch_lightning', 'lightning_fabric', 'mccl_lightning.hooks'}\n"
        "print('HOOKED', 'mccl_lightning._autoload' in sys.modules, heavy & set(sys.modules))\n"
    )
    assert "HOOKED True set()" in run_alone("-c", code).stdout


@pytest.mark.parametrize("package", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.slow)])
def test_a_script_that_imports_nothing_of_this_project_has_the_strategy(run_alone: Callable, package: str) -> None:
    output = run_alone("-c", TRAINER.format(package=package)).stdout
    assert "STRATEGY mccl_ddp" in output, output


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["before Lightning", "after Lightning"])
def test_an_import_does_the_same_where_autoload_is_off(run_alone: Callable, late: bool) -> None:
    script = TRAINER.format(package="lightning.pytorch")
    script = script.replace("import torch\n", "import mccl_lightning\n") if late else f"import mccl_lightning\n{script}"
    output = run_alone("-c", script, environ={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}).stdout
    assert "STRATEGY mccl_ddp" in output, output


@pytest.mark.slow
def test_torch_loads_where_lightning_is_broken(run_alone: Callable, tmp_path: Path) -> None:
    package = tmp_path / "lightning"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('half installed')")
    code = "import torch\ntry:\n import lightning.pytorch\nexcept OSError as error:\n print('SEEN', error)"
    output = run_alone("-c", code).stdout
    assert "SEEN half installed" in output, output


def test_it_installs_one_finder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    autoload()
    autoload()
    assert sum(isinstance(finder, LightningFinder) for finder in sys.meta_path) == 1


def test_a_missing_lightning_is_not_found_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [])
    assert LightningFinder().find_spec("lightning.pytorch.strategies", None) is None
    assert LightningFinder().find_spec("json", None) is None


def test_a_changed_lightning_is_left_alone_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("lightning.fabric.connector")
    with pytest.warns(UserWarning, match=r"cannot run on mccl: lightning.fabric.connector has changed"):
        hooks.install(module)


def test_a_changed_lightning_is_an_error_in_fleet_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MCCL_FLEET": "1", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ImportError, match="has changed"):
        hooks.install(types.ModuleType("lightning.fabric.connector"))
