"""`mccl-fleet version`."""

from __future__ import annotations

import json
from importlib import metadata

from mccl_fleet.options import Json

_PACKAGES = ("mccl-fleet", "torch", "ray", "lightning")


def version(as_json: Json = False) -> None:
    """Prints the versions of mccl-fleet and of what it stands on; a head and its Macs need the same ones."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    if as_json:
        print(json.dumps(versions))
        return
    for package, number in versions.items():
        print(f"{package} {number}")
