"""Processor time of an all-reduce on one machine, against what bare sockets need to move the same bytes.

    python benchmarks/tcp_limit.py --world 2 4 --markdown

An all-reduce of n bytes on N ranks sends 2(N-1) n bytes in all, and adds half as many. The limit is what a pump needs
for that which does nothing else: one process sends pieces of 1 MiB from a buffer as large as the tensor, another
receives 256 KiB at a time and adds every other piece to a tensor. mccl runs over TCP and over Unix sockets, Gloo over
TCP, all in turns. Figures are processor seconds of all processes for each GB all-reduced, medians over rounds.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import socket
import statistics
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch
from allreduce import run_world
from measure import KIB, MIB, Plan, Row, describe, import_mccl, processor_s
from options import make_parser, whole

SEND_NBYTES = MIB
RECEIVE_NBYTES = 256 * KIB
PUMPED_NBYTES = 2**31  # for each figure
TRANSPORTS = {"tcp": "tcp", "unix": "auto"}  # kind of socket → MCCL_TRANSPORT


def connected_pair(kind: str) -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection on this machine; kind: tcp or unix."""
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for sock in (one, other):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


def receive_and_add(sock: socket.socket, total: int, nbytes: int, result: Connection) -> None:
    """The receiving process: takes `total` bytes, adds every other piece to a tensor, reports its processor seconds."""
    torch.set_num_threads(1)
    scratch = torch.zeros(RECEIVE_NBYTES // 4)
    view = memoryview(scratch.numpy()).cast("B")
    target = torch.zeros(nbytes // 4)
    received, at = 0, 0
    before = processor_s()
    while received < total:
        filled = 0
        while filled < RECEIVE_NBYTES and received < total:
            count = sock.recv_into(view[filled:])
            filled += count
            received += count
        if received // RECEIVE_NBYTES % 2:
            at = at if at + scratch.numel() <= target.numel() else 0
            piece = target[at : at + scratch.numel()]
            piece.add_(scratch[: piece.numel()])
            at += piece.numel()
    result.send(processor_s() - before)


def pump(kind: str, nbytes: int) -> float:
    """Processor seconds of both processes for each GB that is sent, received, and every other time added."""
    mine, theirs = connected_pair(kind)
    receiving, sending = mp.Pipe(duplex=False)
    receiver = mp.get_context("fork").Process(target=receive_and_add, args=(theirs, PUMPED_NBYTES, nbytes, sending))
    receiver.start()
    theirs.close()
    view = memoryview(torch.ones(nbytes // 4).numpy()).cast("B")
    sent, before = 0, processor_s()
    while sent < PUMPED_NBYTES:
        at = sent % nbytes
        sent += mine.send(view[at : min(at + SEND_NBYTES, at + PUMPED_NBYTES - sent)])
    own_s = processor_s() - before
    total_s = own_s + float(receiving.recv())
    receiver.join()
    mine.close()
    return total_s / (PUMPED_NBYTES / 1e9)


@contextlib.contextmanager
def transport(name: str) -> Iterator[None]:
    """Ranks that are started inside have this MCCL_TRANSPORT."""
    variable = "MCCL_TRANSPORT"
    before = os.environ.get(variable)
    os.environ[variable] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def measure_round(world: int, nbytes: int, seconds: float) -> Row:
    """One round: the pump and mccl over both kinds of sockets, and Gloo beside each."""
    row: Row = {}
    gloo = []
    for kind, name in TRANSPORTS.items():
        row[f"bare_{kind}"] = 2 * (world - 1) * pump(kind, nbytes)
        with transport(name):
            (measured,) = run_world(world, Plan((nbytes,), seconds))
        row[f"mccl_{kind}"] = measured["mccl_cpu_s_per_GB"]
        gloo.append(measured["gloo_cpu_s_per_GB"])
    row["gloo_tcp"] = statistics.mean(gloo)
    return row


def measure(world: int, nbytes: int, seconds: float, rounds: int) -> Row:
    """Medians over the rounds, in processor seconds per GB all-reduced."""
    each = [measure_round(world, nbytes, seconds) for _ in range(rounds)]
    medians = {name: statistics.median(row[name] for row in each) for name in each[0]}
    return {"world": world, "bytes": nbytes, **medians}


def table(rows: list[Row]) -> str:
    """The rows as Markdown; shares are of Gloo's processor time."""
    names = ["bare_tcp", "mccl_tcp", "bare_unix", "mccl_unix", "gloo_tcp"]
    titles = ["bare TCP", "mccl, TCP", "bare Unix sockets", "mccl, Unix sockets", "Gloo, TCP"]
    lines = [["ranks", "MiB", *titles], ["---"] * 7]
    for row in rows:
        cells = [f"{row[name]:.2f} ({row[name] / row['gloo_tcp']:.0%})" for name in names]
        lines.append([f"{row['world']:.0f}", f"{row['bytes'] / MIB:g}", *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    """Parses, runs, prints."""
    parser = make_parser(__doc__, [64 * MIB])
    parser.add_argument("--world", type=whole(2, 256, " ranks"), nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--rounds", type=whole(1, 1000), default=3, help="rounds, of which the median is taken")
    arguments = parser.parse_args()
    if arguments.in_flight != 1:
        parser.error("--in-flight: one all-reduce at a time is measured here")
    if min(arguments.sizes) < RECEIVE_NBYTES:
        parser.error(f"--sizes: at least {RECEIVE_NBYTES} bytes: the pump moves that many at a time")
    try:
        import_mccl()
    except RuntimeError as error:
        parser.error(str(error))
    rows = [
        measure(world, nbytes, arguments.seconds, arguments.rounds)
        for world in arguments.world
        for nbytes in arguments.sizes
    ]
    result = describe("loopback, not shaped", arguments.commit) | {"unit": "processor seconds per GB all-reduced"}
    text = json.dumps(result | {"rows": rows}, indent=2)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(table(rows) if arguments.markdown else text)


if __name__ == "__main__":
    main()
