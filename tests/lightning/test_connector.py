"""`strategy="mccl_ddp"` outside a fleet: alone, under a launcher, and on a pretended Mac."""

import importlib
from typing import Any

import lightning.fabric as fabric
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from mccl_lightning.strategy import VARIANTS, derived_class

pytestmark = pytest.mark.timeout(60)
FABRICS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MCCL_FLEET"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def rank_3_of_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes with two processes each."""
    variables = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 1}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def quiet_trainer(package: Any = pl, **arguments: Any) -> Any:
    return package.Trainer(
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **arguments,
    )


def pretend_mps(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    accelerator = importlib.import_module(f"{FABRICS[package]}.accelerators.mps").MPSAccelerator
    monkeypatch.setattr(accelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(
        importlib.import_module(f"{package}.accelerators.mps").MPSAccelerator,
        "is_available",
        staticmethod(lambda: True),
    )


def test_the_names_are_registered() -> None:
    assert set(VARIANTS) <= set(StrategyRegistry.available_strategies())


def test_alone_it_is_a_world_of_one() -> None:
    trainer = quiet_trainer(strategy="mccl_ddp")
    assert (trainer.world_size, trainer.global_rank, trainer.strategy.root_device.type) == (1, 0, "cpu")
    assert trainer.strategy._get_process_group_backend() == "mccl"
    assert trainer.strategy._ddp_kwargs == {}


def test_the_variant_passes_its_argument_on() -> None:
    trainer = quiet_trainer(strategy="mccl_ddp_find_unused_parameters_true")
    assert trainer.strategy._ddp_kwargs == {"find_unused_parameters": True}


def test_the_users_backend_is_kept() -> None:
    strategy = derived_class(DDPStrategy)(process_group_backend="gloo", bucket_cap_mb=5)
    trainer = quiet_trainer(strategy=strategy)
    assert trainer.strategy._get_process_group_backend() == "gloo"
    assert trainer.strategy._ddp_kwargs == {"bucket_cap_mb": 5}


def test_a_launchers_ranks_are_taken(rank_3_of_4: None) -> None:
    trainer = quiet_trainer(strategy="mccl_ddp")
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank) == (4, 3, 1, 1)
    assert (trainer.num_nodes, trainer.strategy.num_processes) == (2, 2)
    assert fabric.Fabric(strategy="mccl_ddp").global_rank == 3


def test_devices_that_contradict_the_launcher_are_an_error(rank_3_of_4: None) -> None:
    trainer = quiet_trainer(strategy="mccl_ddp", devices=3)
    with pytest.raises(ValueError, match="devices=3 times num_nodes=1 is 3 processes, but the launcher started 4"):
        trainer.strategy.launcher.launch(lambda: None, trainer=trainer)


def test_other_strategies_are_left_alone(rank_3_of_4: None) -> None:
    trainer = quiet_trainer(strategy="auto")
    assert type(trainer.strategy).__name__ == "SingleDeviceStrategy"


@pytest.mark.parametrize("package", FABRICS)
@pytest.mark.parametrize("accelerator", ["auto", "gpu", "mps"])
@pytest.mark.parametrize("strategy", VARIANTS)
def test_on_a_mac_it_uses_mps_and_mccl(
    monkeypatch: pytest.MonkeyPatch, package: str, accelerator: str, strategy: str
) -> None:
    pretend_mps(monkeypatch, package)
    chosen = quiet_trainer(importlib.import_module(package), strategy=strategy, accelerator=accelerator).strategy
    assert chosen.root_device == torch.device("mps:0")
    assert chosen._get_process_group_backend() == "mccl"
    assert chosen.determine_ddp_device_ids() is None
    other = importlib.import_module(FABRICS[package]).Fabric(strategy=strategy, accelerator=accelerator)
    assert other.strategy.root_device == torch.device("mps:0")


def test_an_object_is_accepted_on_a_mac_with_all_it_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_mps(monkeypatch, "lightning.pytorch")
    precision = pl.plugins.MixedPrecision("bf16-mixed", "mps")
    trainer = quiet_trainer(strategy=derived_class(DDPStrategy)(precision_plugin=precision))
    assert trainer.strategy.root_device == torch.device("mps:0")
    assert trainer.precision_plugin is precision


def test_stock_ddp_is_still_refused_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_mps(monkeypatch, "lightning.pytorch")
    with pytest.raises(ValueError, match="not supported on the MPS accelerator"):
        quiet_trainer(strategy="ddp")


def test_cuda_gets_nccl_and_its_device_ids() -> None:
    strategy = derived_class(DDPStrategy)(parallel_devices=[torch.device("cuda:0")])
    assert strategy._get_process_group_backend() == "nccl"
    assert strategy.determine_ddp_device_ids() == [0]


def test_a_foreign_backend_of_that_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def foreign() -> None:
        raise RuntimeError("another package registered the backend name mccl")

    monkeypatch.setattr("mccl_core.require_backend", foreign)
    with pytest.raises(RuntimeError, match="another package registered"):
        quiet_trainer(strategy="mccl_ddp").strategy._get_process_group_backend()
