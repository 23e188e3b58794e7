from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, TypedDict

import torch

from mccl_core.flight import FlightEntry

class OpCounters(TypedDict):
    """Of one kind of op by one algorithm; csrc/engine/metrics.hpp says what each field counts."""

    algorithm: str  # empty where there is only one
    count: int
    failed: int
    nbytes: int
    sent_nbytes: int
    bus_nbytes: int
    busy_ns: int
    queued_ns: int
    parked_nbytes: int
    waited_ns: dict[bytes, int]  # by process

class Engine:
    def __init__(self, options: dict[str, int]) -> None: ...
    def add_connection(self, fd: int, process: bytes, lane: int, host: str) -> None: ...
    def connected(self, process: bytes, lane: int) -> bool: ...
    def flight_record(self) -> list[FlightEntry]: ...
    def metrics(self) -> dict[str, list[OpCounters]]: ...  # by kind; of each the algorithms that were used
    def reset_metrics(self) -> None: ...
    def parked_nbytes(self) -> int: ...
    # The fields of mccl_core.faults.ErrorReport.
    def last_failure(self) -> dict[str, Any] | None: ...
    def open_failure(self) -> dict[str, Any] | None: ...
    def shutdown(self) -> None: ...
    def close_descriptors_in_child(self) -> None: ...

class ProcessGroupMCCL:
    class Options: ...

    def __init__(
        self,
        engine: Engine,
        group_id: int,
        rank: int,
        members: list[tuple[bytes, str]],
        planner: dict[str, Any],
        timeout: timedelta,
        connect: Callable[[int, int], None],  # rank, channel
        regroup: Callable[[list[int], bool], ProcessGroupMCCL | None],
        compression: dict[str, Any],
        make: Callable[[Any, int, int, timedelta, str], ProcessGroupMCCL],
        on_failure: Callable[[str], None],
        name: str,
    ) -> None: ...
    @property
    def group_id(self) -> int: ...
    def barrier(self, opts: Any) -> Any: ...  # c10d's, as all collectives
    def agree(self, ranks_to_exclude: list[int]) -> list[int]: ...

class Work:
    def _plain_future(self) -> Any: ...
    def _callback_place(self) -> tuple[int, int] | None: ...

# Completes `to`, a torch future, as `from_` completes.
def forward_future(from_: Any, to: Any) -> None: ...
def child_place(ticket: int, tag: int, index: int) -> tuple[int, int]: ...

class InCallback:
    def __init__(self, ticket: int, tag: int) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: object) -> None: ...

class SimulatedDevice:
    """For tests: from here to `close`, tensors of the CPU are those of a device whose kernels run late, on a thread.

    `fill` and `copy` are kernels; others that PyTorch runs on such tensors run at once, as ever.
    """

    def __init__(self, *, seed: int, longest_delay_us: int, private_memory: bool) -> None: ...
    def fill(self, tensor: torch.Tensor, value: float) -> None: ...
    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None: ...
    def hold(self) -> None:
        """A kernel that does not end before `resume`."""
    def resume(self) -> None: ...
    def synchronize(self) -> None:
        """Blocks until all kernels have run."""
    def close(self) -> None: ...

# The plan that is used, then all that could be, the fastest first: (algorithm, chunks, seconds, channels).
def plans(planner: dict[str, Any], collective: str, world: int, nbytes: int) -> list[tuple[str, int, float, int]]: ...

class Simulation(TypedDict):
    """What `simulate` says. Seconds count from the first op's time zero."""

    posted_s: list[float]  # by op: when the first rank started it
    finish_s: list[float]  # by op: when the last rank had finished it; infinite where it could not
    last_finish_s: float
    egress_busy_share: list[float]  # by rank
    uplink_busy_share: list[float]  # by switch; empty where there is one
    segments: int
    deadlock: str | None  # who waits for whom

def all_reduce_algorithms() -> list[str]: ...
def simulate(
    collective: Literal["all_reduce"],
    algorithm: str,
    *,
    world: int,
    nbytes: list[int],
    ready_s: list[float],
    alpha_s: float,
    goodput_bytes_per_s: float,
    segment_nbytes: int,
    forward_nbytes: int,
    credit_nbytes: int,
    element_nbytes: int = 4,
    chunk_count: int = 1,
    channel_count: int = 1,
    segment_cost_s: float = 0.0,
    burst_nbytes: int = 0,
    groups: list[int] = ...,
    uplink_goodput_bytes_per_s: float = 0.0,
    uplink_latency_s: float = 0.0,
    max_in_flight: int = 0,
    delay_s: list[float] = ...,
    skew_s: float = 0.0,
    seed: int = 0,
) -> Simulation:
    """One collective, or several in flight, on a modelled network (csrc/schedule/simulate.hpp).

    `nbytes` and `ready_s` have one entry an op, in the order in which ranks start them; `groups` (the switch) and
    `delay_s` one a rank, or none. Raises ValueError for arguments that make no sense.
    """
