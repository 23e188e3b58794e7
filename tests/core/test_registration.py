"""The backend registers itself at `import torch`, and says so where it cannot."""

from __future__ import annotations

import subprocess
import sys


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ | env
    )


def test_import_torch_is_enough() -> None:
    done = python(
        "import sys, torch, torch.distributed as d;"
        "print(d.Backend.default_device_backend_map['mps'], 'MCCL' in d.Backend._plugins,"
        "'pydantic' in sys.modules, 'mccl_core._C' in sys.modules)"
    )
    assert done.stdout.split() == ["mccl", "True", "False", "False"], done.stderr


def test_import_mccl_core_where_autoloading_is_off() -> None:
    ask = "print('MCCL' in d.Backend._plugins);"
    code = f"import torch.distributed as d; {ask} import mccl_core; {ask}"
    done = python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.split() == ["False", "True"], done.stderr


OTHER = """
import torch.distributed as d
def creator(*a): raise SystemExit("the other one")
d.Backend._plugins.pop("MCCL", None)
d.Backend.register_backend("mccl", creator, devices=["cpu"])
import mccl_core
print("imported")
try:
    mccl_core.require_backend()
except RuntimeError as error:
    print(error)
"""


def test_another_package_with_the_name_is_a_warning_and_then_an_error() -> None:
    done = python(OTHER, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "imported" in done.stdout, done.stderr
    assert "already registered by __main__" in done.stdout
    assert "already registered by __main__" in done.stderr  # the warning at import


def test_a_bad_variable_names_itself() -> None:
    call = "d.init_process_group('mccl', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)"
    code = f"import torch.distributed as d; {call}"
    done = python(code, MCCL_SEGMENT_NBYTES="12")
    assert done.returncode != 0
    assert "MCCL_SEGMENT_NBYTES" in done.stderr and "4096" in done.stderr
