"""One round: a network's hosts, a rank on each, one fault, and everything that must hold afterwards."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from netns.host import Host
from netns.network import Network
from netns.ranks import ranks_on
from support.rank_processes import Outcome

from chaos.faults import FAULTS, HEARTBEAT_MS, Fault, Scene, blames
from chaos.workload import Account, Board, train

# A busy machine runs two dozen processes on two cores: a limit is a rule's time and this much more. The report holds
# the times themselves.
SLACK_S = 10.0
REPORT_S = 60.0
STARTED_STEPS = 2
GOING_ON_STEPS = 4  # after a fault that costs nothing but time


class Broken(AssertionError):
    """A promise was not kept; the text says in which round, what was done and what was seen."""


@dataclass
class Tally:
    """What a campaign has seen so far."""

    rounds: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    detected_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    op_count: int = 0
    nbytes: int = 0
    broken: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """As the report has it: rounds a fault, and how long the last survivor took to know."""
        return {
            "faults": sum(self.rounds.values()),
            "by_fault": {
                name: {"rounds": count} | _times(self.detected_s.get(name, [])) for name, count in self.rounds.items()
            },
            "exact_ops": self.op_count,
            "exact_bytes": self.nbytes,
            "broken": self.broken,
        }


def _times(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {"median_s": round(statistics.median(seconds), 3), "slowest_s": round(max(seconds), 3)}


class Campaign:
    """Rounds on one network; the hosts are the same in every round, the processes are not."""

    def __init__(self, network: Network, seed: int, faults: list[Fault] | None = None) -> None:
        self.network = network
        self.tally = Tally()
        self._random = random.Random(seed)
        self._faults = faults or FAULTS
        self._bag: list[Fault] = []
        self._fd_count = _fd_count()

    def next_round(self, world: int) -> str:
        """Runs one round on the first `world` hosts; returns a line that tells of it.

        Raises:
            Broken: something that must hold did not.
        """
        if not self._bag:  # every kind once before any comes again
            self._bag = self._random.sample(self._faults, len(self._faults))
        fault = self._bag.pop()
        seed = self._random.randrange(1 << 30)
        victims = fault.choose_victims(self._random, world)
        what = f"{fault.name} of rank {', '.join(map(str, victims))} of {world}, seed {seed}"
        self.tally.rounds[fault.name] += 1
        try:
            took_s = self._run(fault, victims, world, seed)
            self._check_leftovers()
        except AssertionError as error:
            self.tally.broken.append(f"{what}: {error}")
            raise Broken(self.tally.broken[-1]) from error
        if took_s is None:
            return f"{what}: exact"
        self.tally.detected_s[fault.name].append(took_s)
        return f"{what}: known to all after {took_s:.2f} s"

    def _run(self, fault: Fault, victims: list[int], world: int, seed: int) -> float | None:
        hosts = self.network.hosts[:world]
        board = Board(world)
        sabotage = fault.sabotage(victims)
        environ = {"MCCL_HEARTBEAT_INTERVAL_MS": str(HEARTBEAT_MS), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        struck_at = time.monotonic()
        try:
            with ranks_on(hosts, train, seed, board, sabotage, timeout_s=fault.op_timeout_s, **environ) as ranks:
                _wait_for_steps(board, STARTED_STEPS, or_act=True)
                time.sleep(self._random.uniform(0, 0.1))
                struck_at = time.monotonic()
                if fault.strike is not None:
                    fault.strike(Scene(self._random, self.network, ranks, board, hosts), victims)
                if fault.detection is None:
                    _wait_for_steps(board, board.least_steps() + GOING_ON_STEPS, or_act=False)
                    board.stop()
                silent = [] if fault.detection is None or fault.victims_report else victims
                outcomes = ranks.outcomes(REPORT_S, [rank for rank in range(world) if rank not in silent])
            return self._judge(fault, victims, outcomes, max(struck_at, board.acted_at))
        finally:
            self._mend(hosts)
            board.close()

    def _judge(self, fault: Fault, victims: list[int], outcomes: list[Outcome], struck_at: float) -> float | None:
        known_at = struck_at
        for rank, outcome in enumerate(outcomes):
            if fault.detection is not None and rank in victims and not fault.victims_report:
                continue
            assert outcome.text == "", f"rank {rank}: {outcome.text}"
            account: Account = outcome.result
            self.tally.op_count += account.op_count
            self.tally.nbytes += account.nbytes
            assert account.stale == 0, f"rank {rank}: {account.stale} failed ops left numbers that look like results"
            if fault.detection is None:
                assert account.error == "", f"rank {rank} failed: {account.error}"
                continue
            assert account.error, f"rank {rank} saw no error"
            if rank in victims:
                continue
            assert blames(account.error, fault, victims), f"rank {rank} blames another: {account.error}"
            known_at = max(known_at, account.error_at)
            if account.survivors:
                expected = [r for r in range(len(outcomes)) if r not in victims]
                assert account.survivors == expected, f"rank {rank} went on with {account.survivors}, not {expected}"
        if fault.detection is None:
            return None
        took_s = known_at - struck_at
        assert took_s < fault.limit_s() + SLACK_S, f"known to all after {took_s:.2f} s, asked {fault.limit_s():g} s"
        return took_s

    def _mend(self, hosts: list[Host]) -> None:
        self.network.stop_dropping()
        for host in hosts:
            self.network.mend(host)

    def _check_leftovers(self) -> None:
        here = _fd_count()
        assert here <= self._fd_count, f"{here - self._fd_count} descriptors are left"
        for host in self.network.hosts:
            left = host.processes()
            assert not left, f"processes {left} are left on {host.name}"


def _fd_count() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _wait_for_steps(board: Board, count: int, *, or_act: bool) -> None:
    """Until every rank has done that many steps, or it takes too long, or a victim has done something wrong."""
    until = time.monotonic() + REPORT_S
    while board.least_steps() < count and time.monotonic() < until and not (or_act and board.acted_at > 0):
        time.sleep(0.002)
