"""Fleet mode: what a Trainer or Fabric ends up with, whatever the script asked for."""

import importlib
from typing import Any

import lightning.fabric as fabric
import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy

from mccl_lightning.contract import FleetEnvironment

pytestmark = pytest.mark.timeout(60)
NAMESPACES = ("lightning.pytorch", "pytorch_lightning")


@pytest.fixture(autouse=True)
def fleet_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of rank 2 of 3."""
    environment = FleetEnvironment(rank=2, world_size=3, node_rank=2, master_addr="10.0.0.1", master_port=29500)
    for name, value in environment.to_environ().items():
        monkeypatch.setenv(name, value)


def quiet_trainer(package: Any = pl, **arguments: Any) -> Any:
    return package.Trainer(
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **arguments,
    )


def assert_adapted(strategy: Any) -> None:
    assert type(strategy).__name__ == "MCCLDDPStrategy"
    assert strategy.root_device == torch.device("cpu")
    assert (strategy.global_rank, strategy.local_rank, strategy.world_size, strategy.node_rank) == (
        2,
        0,
        3,
        2,
    )
    assert (strategy.num_nodes, strategy.num_processes) == (3, 1)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 3, "rank": 2}
    assert strategy._get_process_group_backend() == "mccl"
    environment = strategy.cluster_environment
    assert environment.creates_processes_externally
    assert (environment.main_address, environment.main_port) == ("10.0.0.1", 29500)
    environment.validate_settings(num_devices=1, num_nodes=3)


@pytest.mark.parametrize("package", NAMESPACES)
@pytest.mark.parametrize("strategy", ["auto", "ddp", "DDP", "ddp_spawn", "ddp_notebook", "mccl_ddp"])
def test_strategy_names_become_mccl_ddp(package: str, strategy: str) -> None:
    trainer = quiet_trainer(importlib.import_module(package), strategy=strategy)
    assert_adapted(trainer.strategy)
    assert trainer.strategy._ddp_kwargs == {}


@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork", "mccl_ddp"])
def test_find_unused_parameters_is_kept(strategy: str) -> None:
    trainer = quiet_trainer(strategy=f"{strategy}_find_unused_parameters_true")
    assert_adapted(trainer.strategy)
    assert trainer.strategy._ddp_kwargs == {"find_unused_parameters": True}


@pytest.mark.parametrize("accelerator", ["auto", "gpu", "cuda", "mps", "cpu"])
@pytest.mark.parametrize(("devices", "num_nodes"), [("auto", 1), (-1, 1), (8, 4), ([0, 3], 1), ("0,1", 2), (1, 1)])
def test_devices_nodes_and_accelerators_are_the_fleets(accelerator: str, devices: Any, num_nodes: int) -> None:
    trainer = quiet_trainer(accelerator=accelerator, devices=devices, num_nodes=num_nodes)
    assert_adapted(trainer.strategy)
    assert (trainer.num_devices, trainer.num_nodes, trainer.world_size) == (1, 3, 3)


def test_a_ddp_object_keeps_its_arguments_and_identity() -> None:
    strategy = DDPStrategy(
        gradient_as_bucket_view=True,
        process_group_backend="gloo",
        cluster_environment=SLURMEnvironment(),
        start_method="spawn",
    )
    trainer = quiet_trainer(strategy=strategy, accelerator="gpu", devices=4)
    assert trainer.strategy is strategy
    assert_adapted(strategy)
    assert strategy._ddp_kwargs == {"gradient_as_bucket_view": True}


def test_a_users_subclass_of_ddp_keeps_its_methods() -> None:
    class Own(DDPStrategy):
        def pre_backward(self, closure_loss: Any) -> None:
            raise NotImplementedError

        def _get_process_group_backend(self) -> str:
            return "nccl"

    trainer = quiet_trainer(strategy=Own())
    assert_adapted(trainer.strategy)
    assert isinstance(trainer.strategy, Own)
    assert type(trainer.strategy).pre_backward is Own.pre_backward


def test_other_plugins_are_kept_and_environments_replaced() -> None:
    precision = pl.plugins.MixedPrecision("bf16-mixed", "cpu")
    trainer = quiet_trainer(plugins=[precision, LightningEnvironment()])
    assert_adapted(trainer.strategy)
    assert trainer.precision_plugin is precision


@pytest.mark.parametrize(
    "strategy", ["fsdp", "deepspeed", "deepspeed_stage_2", "FSDP", FSDPStrategy(), SingleDeviceStrategy()]
)
def test_what_cannot_run_is_refused_with_what_can(strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"does not run on this fleet.*use strategy='ddp'"):
        quiet_trainer(strategy=strategy)


def test_another_accelerator_is_refused() -> None:
    with pytest.raises(ValueError, match="accelerator='tpu' does not run on this fleet; use 'auto'"):
        quiet_trainer(accelerator="tpu")


@pytest.mark.parametrize("strategy", ["auto", "ddp", "ddp_find_unused_parameters_true", "mccl_ddp"])
def test_fabric_is_adapted_too(strategy: str) -> None:
    assert_adapted(fabric.Fabric(strategy=strategy, devices=4, accelerator="gpu").strategy)


def test_a_script_without_a_fleets_variables_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ValueError, match="MCCL_FLEET=1, but MASTER_ADDR is not set"):
        quiet_trainer()


def test_callbacks_are_added_in_fleet_mode_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("MCCL_FLEET_STAGING_DIR", str(tmp_path))
    names = [type(callback).__name__ for callback in quiet_trainer().callbacks]
    assert names == ["FleetPosition", "FleetReporter", "FleetCheckpoint"]
    monkeypatch.delenv("MCCL_FLEET")
    assert quiet_trainer(strategy="auto").callbacks == []


def test_a_wrong_interval_names_field_value_and_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCCL_FLEET_PROGRESS_INTERVAL_S", "0")
    with pytest.raises(ValueError, match=r"progress_interval_s\n.*greater than or equal to 0.05.*input_value=0.0"):
        quiet_trainer()
