"""The strategy `mccl_ddp`: Lightning's DDP, with the device's backend and the launcher's ranks.

A Mac runs its MPS device over mccl, a CUDA machine NCCL, anything else the CPU over mccl. The rest, and
so the user's DistributedDataParallel arguments, is Lightning's own DDPStrategy.
"""

import functools
from collections.abc import Callable
from typing import Any

from mccl_lightning.backend import BACKEND, require_backend
from mccl_lightning.namespaces import Namespace
from mccl_lightning.position import ResumedLoader

NAME = "mccl_ddp"
VARIANTS: dict[str, dict[str, Any]] = {
    NAME: {},
    f"{NAME}_find_unused_parameters_true": {"find_unused_parameters": True},
}
"""Names that a Trainer takes, and the DistributedDataParallel arguments that each stands for."""


def is_ours(strategy: Any) -> bool:
    """True for the names and the objects of `mccl_ddp`."""
    if isinstance(strategy, str):
        return strategy.lower() in VARIANTS
    return getattr(strategy, "runs_on_mccl", False)


@functools.cache
def derived_class(base: Any) -> Any:
    """A subclass of a DDPStrategy, the Trainer's or Fabric's, with this module's changes.

    It inherits from `base` alone: an existing object of `base` can then take the class.
    """

    class MCCLDDPStrategy(base):
        strategy_name = NAME
        runs_on_mccl = True
        position: ResumedLoader | None = None
        """Set while a fleet's fit resumes from a checkpoint."""

        def _get_process_group_backend(self) -> str:
            """The user's choice, else NCCL between CUDA devices and mccl between all others.

            Raises:
                RuntimeError: another package owns the backend name `mccl`.
            """
            backend: str = self._process_group_backend or ("nccl" if self._on_cuda() else BACKEND)
            if BACKEND in backend:
                require_backend()
            return backend

        def determine_ddp_device_ids(self) -> list[int] | None:
            """Only CUDA takes device ids: DistributedDataParallel refuses them for an MPS module."""
            return [self.root_device.index] if self._on_cuda() else None

        _determine_ddp_device_ids = determine_ddp_device_ids  # Fabric's name for it

        def _setup_model(self, model: Any) -> Any:  # by a Trainer
            return self._ordered_on_mps(super()._setup_model, model)

        def setup_module(self, module: Any) -> Any:  # by Fabric
            return self._ordered_on_mps(super().setup_module, module)

        def _ordered_on_mps(self, wrap: Callable[[Any], Any], module: Any) -> Any:
            """Wraps the module into DDP; on MPS so that the GPU, not the CPU, waits for the gradients.

            Raises:
                ValueError: the user's communication hook cannot be used on MPS; the text says why and which can.
            """
            if self.root_device.type != "mps":
                return wrap(module)
            from mccl_core.ddp import hook_for_mps

            if getattr(self, "_ddp_comm_wrapper", None) is not None:
                raise ValueError("ddp_comm_wrapper cannot be used on MPS; leave it out, or use fp16_compress_hook")
            hook = hook_for_mps(getattr(self, "_ddp_comm_hook", None))
            self._ddp_kwargs.setdefault("gradient_as_bucket_view", True)
            model = wrap(module)
            model.register_comm_hook(getattr(self, "_ddp_comm_state", None), hook)
            return model

        def process_dataloader(self, dataloader: Any) -> Any:
            loader = super().process_dataloader(dataloader)
            if self.position is not None:
                self.position.apply(loader)
            return loader

        def _on_cuda(self) -> bool:
            return self.root_device.type == "cuda"

    return MCCLDDPStrategy


def register(strategies: Any, namespace: Namespace) -> None:
    """Adds the names of `VARIANTS` to the registry of a `strategies` module."""
    registry = getattr(strategies, namespace.registry)
    derived = derived_class(strategies.DDPStrategy)
    for name, arguments in VARIANTS.items():
        registry.register(
            name,
            derived,
            description="DDP with MPS or CPU over mccl, with CUDA over NCCL",
            override=True,
            **arguments,
        )
