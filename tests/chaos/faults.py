"""What can happen in a round, and what must follow: exact results, or the right error on every survivor."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from netns.host import Host
from netns.network import Network
from support.rank_processes import RankProcesses

from chaos.workload import Board, Sabotage
from mccl_core import _runtime

HEARTBEAT_MS = 1000
SILENT_S = 3 * HEARTBEAT_MS / 1000
OP_TIMEOUT_S = 30.0  # of the ops, where a fault does not say otherwise
PORT = 29600

# Detected by a closed socket or a message; by silence; by the op's own timeout.
Detection = Literal["closed", "silence", "timeout"]


@dataclass
class Scene:
    """What a fault may use."""

    random: random.Random
    network: Network
    ranks: RankProcesses
    board: Board
    hosts: list[Host] = field(default_factory=list)


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    `strike(scene, victims)` does it, from outside the ranks, once all of them have begun; `sabotage(victims)` is what
    the victims themselves do. Without `detection` nothing but time may be lost: all results are exact. With it every
    survivor gets a DistBackendError that matches `names`, with {victims} replaced by the ranks.
    """

    name: str
    strike: Callable[[Scene, list[int]], None] | None = None
    sabotage: Callable[[list[int]], Sabotage] = lambda victims: Sabotage()
    detection: Detection | None = None
    names: str = r"rank ({victims})\b"
    victim_count: int = 1
    victims_report: bool = False  # whether the victims live to see an error, too; whom they blame is open
    op_timeout_s: float = OP_TIMEOUT_S
    victim_choice: Literal["any", "first", "neighbours"] = "any"

    def choose_victims(self, rng: random.Random, world: int) -> list[int]:
        if self.victim_choice == "first":
            return [0]
        if self.victim_choice == "neighbours":
            first = rng.randrange(world)
            return [first, (first + 1) % world]
        return sorted(rng.sample(range(world), self.victim_count))

    def limit_s(self) -> float:
        """How soon every survivor must know, on a quiet machine; see campaign.SLACK."""
        return {"closed": 1.0, "silence": SILENT_S, "timeout": self.op_timeout_s, None: 0.0}[self.detection]


def kill(scene: Scene, victims: list[int]) -> None:
    for victim in victims:
        scene.ranks.signal(victim, signal.SIGKILL)


def stop(scene: Scene, victims: list[int]) -> None:
    for victim in victims:
        scene.ranks.signal(victim, signal.SIGSTOP)


def pause(scene: Scene, victims: list[int]) -> None:
    """Stopped for less than a heartbeat, several times."""
    for _ in range(scene.random.randint(1, 4)):
        stop(scene, victims)
        time.sleep(scene.random.uniform(0.01, HEARTBEAT_MS / 1000))
        for victim in victims:
            scene.ranks.signal(victim, signal.SIGCONT)
        time.sleep(0.05)


def cut(scene: Scene, victims: list[int]) -> None:
    for victim in victims:
        scene.network.cut(scene.hosts[victim])


def flicker(scene: Scene, victims: list[int]) -> None:
    """A loose cable: out for a tenth of a heartbeat at most; what TCP makes of it takes longer."""
    for _ in range(scene.random.randint(1, 2)):
        cut(scene, victims)
        time.sleep(scene.random.uniform(0.01, HEARTBEAT_MS / 10_000))
        for victim in victims:
            scene.network.mend(scene.hosts[victim])
        time.sleep(0.3)  # TCP has to send again


def lose_packets(scene: Scene, victims: list[int]) -> None:
    scene.network.drop(scene.hosts[victims[0]], share=scene.random.choice([0.001, 0.01]))


def part(scene: Scene, victims: list[int]) -> None:
    """Two neighbours no longer reach each other; everybody else still reaches both."""
    scene.network.drop(scene.hosts[victims[0]], scene.hosts[victims[1]])


def strangers(scene: Scene, victims: list[int]) -> None:
    """Garbage, half-open and slow connections to the listeners of all victims, from other hosts."""
    program = f"""
import os, socket, struct, time
socks = []
for i in range({scene.random.choice([20, 200])}):
    try:
        sock = socket.create_connection(("{scene.hosts[victims[0]].address}", {PORT}), 1)
        if i % 3 == 0:
            sock.send(os.urandom(1 + i % 900))
        if i % 3 == 1:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
            continue
        socks.append(sock)
    except OSError:
        pass
time.sleep(0.5)
"""
    source = scene.random.choice([host for i, host in enumerate(scene.hosts) if i not in victims])
    command = [sys.executable, "-S", "-c", program]
    with source.popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            process.wait(60)
        finally:
            process.kill()


class Wrong(Sabotage):
    """What a victim does in its n-th step."""

    def __init__(self, victims: list[int], at_step: int = 3) -> None:
        self.victims = victims
        self.at_step = at_step

    def before_step(self, rank: int, step: int, board: Board) -> None:
        if rank in self.victims and step == self.at_step:
            board.act()
            self.act()

    def act(self) -> None:
        raise NotImplementedError


class Raise(Wrong):
    """A script that ends with an exception: what the interpreter runs at exit is run."""

    def act(self) -> None:
        _runtime._stop()
        os._exit(1)


class Leave(Wrong):
    """A process that ends without a word."""

    def act(self) -> None:
        os._exit(0)


class CloseSockets(Wrong):
    """Its connections to other ranks break, and the process lives on."""

    def act(self) -> None:
        for entry in list(Path("/proc/self/fd").iterdir()):
            try:
                sock = socket.socket(fileno=os.dup(int(entry.name)))
            except OSError:
                continue
            with sock:
                try:
                    ports = (sock.getsockname()[1], sock.getpeername()[1])
                    if sock.type == socket.SOCK_STREAM and any(PORT <= port < PORT + 100 for port in ports):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        sock.shutdown(socket.SHUT_RDWR)
                except (OSError, IndexError, TypeError):
                    continue


class Abort(Wrong):
    def act(self) -> None:
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).abort()


class OtherSize(Wrong):
    def act(self) -> None:
        dist.all_reduce(torch.zeros(7))


class OtherDtype(Wrong):
    def act(self) -> None:
        dist.all_reduce(torch.zeros(1, dtype=torch.float64), op=dist.ReduceOp.MAX)


class OtherCollective(Wrong):
    def act(self) -> None:
        dist.barrier()


class Late(Wrong):
    """Longer than the op's timeout away, with a beating heart."""

    def act(self) -> None:
        time.sleep(7)


class Slow(Wrong):
    """A long backward: many heartbeats without a collective, which is not silence."""

    def act(self) -> None:
        time.sleep(2 * SILENT_S)


class Shrinks(Sabotage):
    shrinks = True


MISMATCH = r"mismatch"
FAULTS = [
    Fault("kill", kill, detection="closed"),
    Fault("kill two", kill, detection="closed", victim_count=2),
    Fault("kill rank 0", kill, detection="closed", victim_choice="first"),
    Fault("kill, then shrink", kill, lambda victims: Shrinks(), detection="closed"),
    Fault("kill rank 0, then shrink", kill, lambda victims: Shrinks(), detection="closed", victim_choice="first"),
    Fault("raise", None, Raise, detection="closed"),
    Fault("leave", None, Leave, detection="closed"),
    Fault("close sockets", None, CloseSockets, detection="closed", victims_report=True),
    Fault("abort", None, Abort, detection="closed", victims_report=True),
    Fault("other size", None, OtherSize, detection="closed", names=MISMATCH, victims_report=True),
    Fault("other dtype", None, OtherDtype, detection="closed", names=MISMATCH, victims_report=True),
    Fault("other collective", None, OtherCollective, detection="closed", names=MISMATCH, victims_report=True),
    Fault("stop", stop, detection="silence"),
    Fault("cut", cut, detection="silence", victims_report=True),
    Fault("part", part, detection="silence", victim_choice="neighbours", victims_report=True),
    Fault("late", None, Late, detection="timeout", op_timeout_s=5.0, victims_report=True),
    Fault("slow", None, Slow),
    Fault("pause", pause),
    Fault("flicker", flicker),
    Fault("lost packets", lose_packets),
    Fault("strangers", strangers),
]


def blames(text: str, fault: Fault, victims: list[int]) -> bool:
    """Whether the error's text is what the fault must lead to."""
    return re.search(fault.names.format(victims="|".join(map(str, victims))), text) is not None
