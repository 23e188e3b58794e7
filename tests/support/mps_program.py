"""Run by torchrun on a Mac, three ranks on its one GPU: all collectives on MPS tensors, and DDP with our hook."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mccl_core.ddp import ddp_hook
from support.device_collectives import SHAPE, check_each

MPS = torch.device("mps")


class MpsKernels:
    """`support.device_collectives.Kernels` on the GPU."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def filled(self, value: float, *shape: int, strided: bool = False) -> torch.Tensor:
        shape = shape or SHAPE
        tensor = torch.full((*shape, 2), -1.0, device=MPS)[..., 0] if strided else torch.full(shape, -1.0, device=MPS)
        busy = torch.ones(1024, 1024, device=MPS)
        for _ in range(20):
            busy = busy @ busy * 1e-3  # what is to be in order comes late
        return tensor.copy_(busy.flatten()[0] * 0 + value)

    def seen(self, tensors: list[torch.Tensor]) -> list[float]:
        copies = [tensor.clone() for tensor in tensors]
        return [c.flatten()[0].item() if (c == c.flatten()[0]).all().item() else float("nan") for c in copies]


def trained(module: nn.Module, device: torch.device, hooked: bool) -> list[torch.Tensor]:
    """The weights after ten steps that the host never waits in."""
    model = DistributedDataParallel(copy.deepcopy(module).to(device), bucket_cap_mb=0.1, gradient_as_bucket_view=True)
    if hooked:
        model.register_comm_hook(None, ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(10):
        optimizer.zero_grad()
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        model(x.to(device)).square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def main() -> None:
    dist.init_process_group("mccl")
    on = MpsKernels(dist.get_rank())
    for strided in (False, True):
        check_each(on, strided=strided)

    torch.manual_seed(0)
    module = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())))
    wanted = trained(module, torch.device("cpu"), hooked=False)
    for hooked in (False, True):
        for a, b in zip(trained(module, MPS, hooked), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    print(f"rank {dist.get_rank()} done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
