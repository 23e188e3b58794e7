"""`mccl-fleet nodes`."""

from __future__ import annotations

import json

from mccl_fleet.options import Address, Json, Profile, head_address, head_errors, one_message
from mccl_fleet.tables import print_table
from mccl_ray.remote import RemoteFleet


def nodes(address: Address = None, profile: Profile = None, as_json: Json = False) -> None:
    """Lists the fleet's head and its Macs."""
    with one_message(), head_errors():
        fleet = RemoteFleet(head_address(address, profile))
        fleet.connect()
        found = sorted(fleet.nodes(), key=lambda node: (node["role"] != "head", node["name"]))
    if as_json:
        for node in found:
            print(json.dumps(node))
        return
    print_table(
        ("name", "address", "role", "pools"),
        [(node["name"], node["ip"], node["role"], " ".join(node["pools"]) or "none") for node in found],
    )
