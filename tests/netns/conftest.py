"""Skips these tests where namespaces cannot be used; in CI, where they must run, fails them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from netns.network import Network
from netns.requirements import unmet_requirement
from netns.tools import NetworkError


def obstacle() -> str | None:
    """Why there can be no namespaces here, or None."""
    reason = unmet_requirement()
    if reason is None:
        try:
            with Network(1):
                pass
        except NetworkError as error:
            reason = f"namespaces are not allowed here ({error}): give the container CAP_SYS_ADMIN and CAP_NET_ADMIN"
    return reason


@pytest.fixture(scope="session", autouse=True)
def namespaces() -> None:
    reason = obstacle()
    if reason is None:
        return
    if os.environ.get("CI") == "true" and os.uname().sysname == "Linux":
        pytest.fail(f"CI has to run these tests, but {reason}")
    pytest.skip(reason)


@pytest.fixture(params=[4, pytest.param(8, marks=pytest.mark.slow)])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """So many hosts, of one rank each."""
    with Network(request.param) as network:
        yield network
