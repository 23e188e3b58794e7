"""Trains a small network on two Macs that are joined by a cable, each with half of the data.

On both, with the first one's address on the cable (on the second with --node_rank 1):

    torchrun --nnodes 2 --nproc_per_node 1 --node_rank 0 --master_addr 169.254.1.1 --master_port 29500 train.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mccl  # after torch, which makes it known

EPOCHS = 5


def make_data() -> TensorDataset:
    """4,096 points and what a fixed random network says of them; the same on both Macs."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(4096, 32, generator=generator)
    first, second = (torch.randn(shape, generator=generator) / 32**0.5 for shape in [(32, 64), (64, 1)])
    return TensorDataset(points, torch.tanh(points @ first) @ second)


def main() -> None:
    """Trains, and says how well, and what was moved."""
    mccl.apply_thunderbolt_production_defaults()
    mccl.init()
    device = torch.device("mps") if torch.backends.mps.is_available() else torch.device("cpu")

    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = make_data()
    sampler: DistributedSampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)
        for points, targets in loader:
            loss = nn.functional.mse_loss(model(points.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach(), torch.ones_like(loss)])
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total[0] / total[1]:.4f}", flush=True)

    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    print(f"rank {dist.get_rank()}: {len(weights)} weights, norm {weights.norm().item():.9f}", flush=True)
    mccl.log_metrics()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
