"""The Macs of a fleet, as its Ray head knows them."""

from __future__ import annotations

from dataclasses import dataclass

import ray

from mccl_ray.fleet_size import require

_POOL_PREFIX = "pool:"


@dataclass(frozen=True)
class Mac:
    """A live node that offers a unit of a pool."""

    name: str
    ip: str
    node_id: str
    pool: str


def host_name(node_id: str) -> str:
    """A live node's own name; where it has none but its address (Ray's default), the machine's name."""
    for node in ray.nodes():
        if node["NodeID"] == node_id:
            own = node["NodeName"] not in ("", node["NodeManagerAddress"])
            return str(node["NodeName"] if own else node["NodeManagerHostname"])
    return "unknown"


def list_macs() -> list[Mac]:
    """The live nodes of every pool, ordered by pool and name. Ray must be connected."""
    macs = [
        Mac(
            name=host_name(node["NodeID"]),
            ip=node["NodeManagerAddress"],
            node_id=node["NodeID"],
            pool=resource.removeprefix(_POOL_PREFIX),
        )
        for node in ray.nodes()
        if node["Alive"]
        for resource in node["Resources"]
        if resource.startswith(_POOL_PREFIX)
    ]
    return sorted(macs, key=lambda mac: (mac.pool, mac.name))


def require_macs(pool: str, workers: int) -> int:
    """The number of live Macs in `pool`, busy ones included. Ray must be connected.

    Raises:
        NotEnoughMacs: there are fewer than `workers`, so that the job could never start.
    """
    names = [mac.name for mac in list_macs() if mac.pool == pool]
    require(pool, workers, names, remedy="join more Macs")
    return len(names)
