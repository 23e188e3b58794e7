"""The wheel, away from the checkout: what it holds, and that it works with nothing but its dependencies."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPT = """
import torch, torch.distributed as dist
import mccl_core
assert "site-packages" in mccl_core.__file__, mccl_core.__file__
dist.init_process_group("mccl", init_method="tcp://127.0.0.1:29999", rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
import mccl
assert mccl.get_metrics()["ops"]["all_reduce"]["count"] == 1, mccl.get_metrics()
dist.destroy_process_group()
print(mccl_core.__version__, "works")
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as a user's pip would build it, but with the torch that is here."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, ROOT]
    subprocess.run(command, check=True)
    (path,) = out.glob("mccl_fleet-*.whl")
    return path


def test_it_holds_our_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {"mccl_core", "mccl_lightning", "mccl_ray", "mccl_fleet"} == {n for n in top if "dist-info" not in n}
    assert any(name.startswith("mccl_core/_C.") and name.endswith(".so") for name in names)
    assert not [name for name in names if "csrc" in name]
    assert {"mccl_core/py.typed", "mccl_core/_C.pyi"} <= set(names)


def test_it_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # The dependencies of this environment, without its .pth files: the checkout is not seen.
    (site / "dependencies.pth").write_text(str(Path(torch.__file__).parents[1]))
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run([sys.executable, *install], check=True)
    done = subprocess.run(
        [tmp_path / "venv/bin/python", "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0.1.0", "works"]
