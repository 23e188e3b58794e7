"""Communication hooks of `mccl_ddp` on MPS, which is pretended: what DDP is given, and what is refused."""

from typing import Any

import lightning.fabric.strategies
import lightning.pytorch.strategies
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from mccl_core import ddp
from mccl_lightning.strategy import derived_class

TRAINERS = lightning.pytorch.strategies.DDPStrategy
FABRICS = lightning.fabric.strategies.DDPStrategy


class Wrapped:
    """Stands for DistributedDataParallel, which needs a process group."""

    def __init__(self, module: Any, device_ids: Any, **arguments: Any) -> None:
        self.arguments = arguments
        self.hooks: list[tuple[Any, Any]] = []

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.hooks.append((state, hook))


@pytest.fixture(autouse=True)
def no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("fabric", "pytorch"):
        monkeypatch.setattr(f"lightning.{package}.strategies.ddp.DistributedDataParallel", Wrapped)


def wrapped(base: Any, device: str, **arguments: Any) -> Any:
    """What the strategy makes of a module on `device`."""
    kind = type("OnDevice", (derived_class(base),), {"root_device": torch.device(device)})
    strategy = kind(**arguments)
    module = torch.nn.Linear(1, 1)
    return strategy._setup_model(module) if base is TRAINERS else strategy.setup_module(module)


@pytest.mark.parametrize("base", [TRAINERS, FABRICS])
def test_on_mps_the_gpu_waits_and_gradients_are_views(base: Any) -> None:
    model = wrapped(base, "mps")
    assert model.hooks == [(None, ddp.ddp_hook)]
    assert model.arguments == {"gradient_as_bucket_view": True}


@pytest.mark.parametrize("base", [TRAINERS, FABRICS])
def test_elsewhere_nothing_is_changed(base: Any) -> None:
    model = wrapped(base, "cpu")
    assert (model.hooks, model.arguments) == ([], {})


def test_the_users_hooks_are_replaced_by_their_equals_or_refused() -> None:
    model = wrapped(TRAINERS, "mps", ddp_comm_hook=default_hooks.bf16_compress_hook, gradient_as_bucket_view=False)
    assert model.hooks == [(None, ddp.bf16_ddp_hook)]
    assert model.arguments == {"gradient_as_bucket_view": False}
    with pytest.raises(ValueError, match="powerSGD_hook cannot be used on MPS"):
        wrapped(TRAINERS, "mps", ddp_comm_hook=powerSGD_hook.powerSGD_hook)
    with pytest.raises(ValueError, match="ddp_comm_wrapper cannot be used on MPS"):
        wrapped(TRAINERS, "mps", ddp_comm_wrapper=default_hooks.fp16_compress_wrapper)
