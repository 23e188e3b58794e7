"""What is counted, for whom was waited, how Prometheus gets it, and that reading never gets in the engine's way."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import socket
import time
import urllib.error
import urllib.request

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

import mccl_core
from mccl_core._metrics_server import PORTS_TRIED, MetricsServer
from mccl_core.metrics import AlgorithmMetrics


def counted(rank: int, world: int) -> None:
    mccl_core.reset_metrics()
    for _ in range(3):
        dist.all_reduce(torch.ones(100))
    dist.broadcast(torch.ones(7, dtype=torch.int64), 0)
    dist.barrier()
    ops = mccl_core.get_metrics()["ops"]
    assert (ops["all_reduce"]["count"], ops["all_reduce"]["bytes"]) == (3, 1200)
    assert (ops["broadcast"]["count"], ops["broadcast"]["bytes"]) == (1, 56)
    assert ops["barrier"]["count"] == 1
    mccl_core.reset_metrics()
    assert mccl_core.get_metrics()["ops"]["all_reduce"] == {"count": 0, "bytes": 0, "sent_bytes": 0, "algorithms": {}}


def test_ops_and_bytes_are_counted() -> None:
    run_ranks(2, counted)


def busy(rank: int, world: int) -> dict[str, AlgorithmMetrics]:
    mccl_core.reset_metrics()
    tensor, all_of_them = torch.ones(300), torch.ones(3 * 300)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    dist.reduce(tensor, 0)
    dist.all_gather_into_tensor(all_of_them, tensor)
    dist.reduce_scatter_tensor(tensor, all_of_them)
    dist.all_to_all_single(all_of_them, all_of_them.clone())
    dist.gather(tensor, list(torch.ones(3, 300)) if rank == 0 else None, 0)
    dist.scatter(tensor, list(torch.ones(3, 300)) if rank == 0 else None, 0)
    if rank < 2:
        dist.send(tensor, 1 - rank) if rank == 0 else dist.recv(tensor, 1 - rank)
    dist.barrier()
    ops = mccl_core.get_metrics()["ops"]
    return {kind: next(iter(op["algorithms"].values())) for kind, op in ops.items() if op["algorithms"]}


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    ranks = run_ranks(3, busy)
    bus_bytes = {kind: entry["bus_bytes"] for kind, entry in ranks[0].items()}
    assert bus_bytes == {
        "all_reduce": 1600,
        "broadcast": 1200,
        "reduce": 1200,
        "all_gather": 2400,
        "reduce_scatter": 2400,
        "gather": 2400,
        "scatter": 2400,
        "all_to_all": 2400,
        "barrier": 0,
        "send/recv": 1200,
    }
    for entry in ranks[0].values():
        assert entry["count"] == 1 and entry["failed"] == 0 and entry["busy_s"] > 0
        assert entry["busbw_GBps"] == pytest.approx(entry["bus_bytes"] / entry["busy_s"] / 1e9)


def algorithms(rank: int, world: int) -> set[str]:
    mccl_core.reset_metrics()
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1 << 20))
    dist.broadcast(torch.ones(1), 0)
    metrics = mccl_core.get_metrics()["ops"]
    assert metrics["all_reduce"]["count"] == 2
    assert list(metrics["broadcast"]["algorithms"]) == ["only"]
    return set(metrics["all_reduce"]["algorithms"])


def test_algorithms_are_counted_apart() -> None:
    assert run_ranks(4, algorithms)[0] == {"recursive_doubling", "ring"}


LATE_S = 0.5
STARTED = "test/started/{}"


def one_is_late(rank: int, world: int) -> dict[str, float]:
    dist.barrier()
    mccl_core.reset_metrics()
    store = dist.distributed_c10d._get_default_store()
    before = {2: [], 3: [2], 0: [2, 3], 1: [2, 3, 0]}
    store.wait([STARTED.format(other) for other in before[rank]])
    if rank == 1:
        time.sleep(LATE_S)  # what is measured is this sleep, as the others see it
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    store.set(STARTED.format(rank), "")
    work.wait()
    (entry,) = mccl_core.get_metrics()["ops"]["all_reduce"]["algorithms"].values()
    return entry["wait_s"]


def test_a_late_rank_is_charged_by_the_one_that_receives_from_it() -> None:
    waits = run_ranks(4, one_is_late, MCCL_ALLREDUCE_ALGO="ring", MCCL_HOST_NAME="here")
    # Rank 2 receives from rank 1, which calls late; rank 3 from rank 2, whose own block was sent at once.
    assert list(waits[2]) == ["rank 1 on here"] and waits[2]["rank 1 on here"] >= LATE_S
    assert waits[1].get("rank 0 on here", 0) < LATE_S
    assert waits[3].get("rank 2 on here", 0) < LATE_S


def parked(rank: int, world: int) -> int:
    mccl_core.reset_metrics()
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(1000), 1)
    dist.barrier()  # after the message, on the same connection: rank 1 has it, and has not asked for it
    if rank == 1:
        held = mccl_core.get_metrics()["parked_bytes"]
        dist.recv(torch.ones(1000), 0)
        assert mccl_core.get_metrics()["parked_bytes"] == 0
        (entry,) = mccl_core.get_metrics()["ops"]["send/recv"]["algorithms"].values()
        assert entry["wait_s"] == {}, "it was there before the call"
        assert entry["parked_bytes"] == held
        return held
    return 0


def test_bytes_that_come_early_are_counted() -> None:
    assert run_ranks(2, parked)[1] == 4000


def queued(rank: int, world: int) -> float:
    tensors = [torch.ones(4 << 20) for _ in range(4)]
    dist.barrier()
    mccl_core.reset_metrics()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait([STARTED.format(0)])  # until then rank 0 may send no more than its credit
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    store.set(STARTED.format(rank), "")
    for work in works:
        work.wait()
    (entry,) = mccl_core.get_metrics()["ops"]["all_reduce"]["algorithms"].values()
    assert entry["count"] == 4
    return entry["queue_s"]


def test_ops_behind_others_queue() -> None:
    assert run_ranks(2, queued)[0] > 0


def fails(rank: int, world: int) -> tuple[int, int]:
    dist.all_reduce(torch.ones(1))
    mccl_core.reset_metrics()
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(10 + rank))
    op = mccl_core.get_metrics()["ops"]["all_reduce"]
    return op["count"], sum(entry["failed"] for entry in op["algorithms"].values())


def test_failed_ops_are_counted_apart() -> None:
    assert run_ranks(2, fails) == [(0, 1), (0, 1)]


def read_while_reducing(rank: int, world: int) -> None:
    # The engine's threads let go of tensors, which takes Python's interpreter lock, while this thread asks the engine.
    for _ in range(2000):
        work = dist.all_reduce(torch.ones(100), async_op=True)
        mccl_core.get_metrics()
        work.wait()
        del work


def test_metrics_can_be_read_at_any_time() -> None:
    run_ranks(2, read_while_reducing)


def test_there_are_none_before_the_first_group(caplog: pytest.LogCaptureFixture) -> None:
    assert mccl_core.get_metrics() == {"ops": {}, "parked_bytes": 0}
    mccl_core.log_metrics()
    assert caplog.messages == ["mccl: nothing was moved yet"]


SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\]|\\.)*",?)*)\})? ([0-9.e+-]+)')


def as_text(rank: int, world: int) -> tuple[str, str]:
    mccl_core.reset_metrics()
    dist.all_reduce(torch.ones(1000))
    dist.barrier()
    url = f"http://127.0.0.1:{port_of_server()}"
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        served = answer.read().decode()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{url}/other", timeout=30)
    return mccl_core.metrics_text(), served


def port_of_server() -> int:
    from mccl_core._runtime import current_runtime

    runtime = current_runtime()
    assert runtime is not None and runtime._metrics_server is not None
    return runtime._metrics_server.port


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_prometheus_text_is_also_served_where_a_port_is_named() -> None:
    port = min(free_port(), 65535 - PORTS_TRIED)
    (text, served), _ = run_ranks(2, as_text, MCCL_METRICS_PORT=str(port), MCCL_HOST_NAME='a"b')
    assert served == text
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    parsed = [SAMPLE.fullmatch(line) for line in samples]
    assert all(parsed), [line for line, match in zip(samples, parsed, strict=True) if not match]
    assert 'mccl_ops_total{op="all_reduce",algorithm="recursive_doubling"} 1' in samples
    assert 'mccl_bytes_total{op="all_reduce",algorithm="recursive_doubling"} 4000' in samples
    assert "mccl_parked_bytes 0" in samples
    named = {match.group(1) for match in parsed if match}
    assert named <= set(re.findall(r"# TYPE (\S+)", text)) == set(re.findall(r"# HELP (\S+)", text))


LOCAL_RANKS = (5, 2)


def port_by_local_rank(rank: int, world: int) -> int:
    os.environ["LOCAL_RANK"] = str(LOCAL_RANKS[rank])
    dist.new_group(backend="mccl")
    return port_of_server()


def port_before_free_ones(offsets: tuple[int, ...]) -> int:
    """A port such that those at these distances above it are free."""
    while True:
        port = min(free_port(), 65535 - PORTS_TRIED)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for offset in offsets:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            return port


def test_each_rank_of_a_machine_serves_on_a_port_of_its_own() -> None:
    base = port_before_free_ones(LOCAL_RANKS)
    ports = run_ranks(2, port_by_local_rank, backend="gloo", MCCL_METRICS_PORT=str(base))
    assert ports == [base + local_rank for local_rank in LOCAL_RANKS]


def test_a_metrics_port_that_cannot_be_had_names_the_variable() -> None:
    with pytest.raises(OSError, match="MCCL_METRICS_PORT"):
        MetricsServer("203.0.113.1", 9400, str)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 65535))
        other.listen()
        with pytest.raises(OSError, match="no port from 65535 to 65535 is free") as info:
            MetricsServer("127.0.0.1", 65535, str)
        assert info.value.errno == errno.EADDRINUSE


class Lines(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def logged(rank: int, world: int) -> str:
    mccl_core.reset_metrics()
    dist.all_reduce(torch.ones(250_000))
    handler = Lines()
    logging.getLogger("mccl").addHandler(handler)
    mccl_core.log_metrics()
    (text,) = handler.texts
    return text


def test_metrics_are_logged_at_a_level_that_is_seen() -> None:
    text = run_ranks(2, logged)[0]
    match = re.search(r"all_reduce, ring: 1 ops, 1.0 MB, ([0-9.]+) GB/s", text)
    assert match and math.isfinite(float(match.group(1))), text
