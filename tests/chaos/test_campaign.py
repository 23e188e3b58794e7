"""The campaign runs, and it would notice."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from netns.conftest import namespaces  # noqa: F401  skips, or fails in CI, where there can be none
from netns.network import Network

from chaos.campaign import Broken, Campaign
from chaos.faults import FAULTS, Fault, OtherSize, Wrong
from chaos.workload import NUMBERS

SECONDS = 120
WORLDS = (4, 8)


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(max(WORLDS)) as network:
        yield network


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_minutes_of_faults(network: Network) -> None:
    campaign = Campaign(network, seed=20)
    until = time.monotonic() + SECONDS
    count = 0
    while time.monotonic() < until or count < len(FAULTS):  # on a busy machine: until each kind has struck
        print(campaign.next_round(WORLDS[count % len(WORLDS)]))
        count += 1
    assert campaign.tally.op_count > 0


class Corrupts(Wrong):
    """Computes with other numbers than it should."""

    def act(self) -> None:
        NUMBERS.add_(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (Fault("nothing that must be noticed", detection="closed"), "saw no error|did not end in time"),
        (Fault("an error that must not be", None, OtherSize), r"failed: mccl: .*mismatch"),
        (Fault("the wrong one blamed", None, OtherSize, "closed", r"rank 99"), "blames another"),
        (Fault("wrong numbers", None, Corrupts), "wrong result"),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else "",
)
def test_a_broken_promise_is_noticed(
    network: Network, monkeypatch: pytest.MonkeyPatch, fault: Fault, complaint: str
) -> None:
    monkeypatch.setattr("chaos.campaign.REPORT_S", 8.0)
    campaign = Campaign(network, seed=1, faults=[fault])
    with pytest.raises(Broken, match=complaint):
        campaign.next_round(2)
    assert campaign.tally.broken
