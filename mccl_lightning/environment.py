"""The one module of this package that reads the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from mccl_lightning.contract import FleetEnvironment, in_fleet


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """This process's place among those that a launcher (torchrun, Ray Train, a fleet worker) has started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str | None
    master_port: int | None

    @classmethod
    def of_fleet(cls, fleet: FleetEnvironment) -> "Launcher":
        """A fleet worker's: one process on each host."""
        return cls(
            rank=fleet.rank,
            world_size=fleet.world_size,
            local_rank=0,
            local_world_size=1,
            node_rank=fleet.node_rank,
            master_addr=fleet.master_addr,
            master_port=fleet.master_port,
        )

    @property
    def nodes(self) -> int:
        """How many nodes there are, were each to run as many processes as this one."""
        return self.world_size // self.local_world_size


def fleet(environ: Mapping[str, str] = os.environ) -> FleetEnvironment | None:
    """What the fleet worker said, None outside of one.

    Raises:
        ValueError: a variable is missing or malformed.
    """
    return FleetEnvironment.from_environ(environ) if in_fleet(environ) else None


def launcher(environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """The launcher's variables, None where nothing has launched this process as a rank.

    `RANK` decides: Lightning's own subprocess launcher, SLURM and MPI do not set it, and have environments of
    their own in Lightning.
    """
    if not all(environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return None
    port = environ.get("MASTER_PORT")
    return Launcher(
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        local_rank=int(environ["LOCAL_RANK"]),
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE") or 1),
        node_rank=int(environ.get("GROUP_RANK") or environ.get("NODE_RANK") or 0),
        master_addr=environ.get("MASTER_ADDR"),
        master_port=int(port) if port else None,
    )
