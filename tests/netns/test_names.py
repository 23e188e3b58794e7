"""Leftovers of a killed owner are swept, and nobody else's."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from netns.names import NAME, sweep
from netns.network import Network

OWNER = """
import sys, time
from netns.network import Network
with Network(2) as network:
    child = network.hosts[0].popen(["sleep", "1000"])
    print(network.hosts[0].namespace, child.pid, flush=True)
    time.sleep(1000)
"""


def test_what_a_killed_owner_left_is_swept_with_its_processes() -> None:
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with (
        Network(1) as mine,
        subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=environ) as owner,
    ):
        try:
            assert owner.stdout is not None
            namespace, pid = owner.stdout.readline().split()
            assert not [name for name in sweep() if name.startswith(namespace.removesuffix("-h0"))], "its owner lives"
        finally:
            owner.send_signal(signal.SIGKILL)
            owner.wait()
        child = os.pidfd_open(int(pid))
        swept = sweep()
        assert namespace in swept and len([name for name in swept if name.startswith(namespace[:-3])]) == 3
        assert mine.hosts[0].namespace not in swept
        try:
            assert select.select([child], [], [], 10)[0], "the process in it lives on"
        finally:
            os.close(child)
        assert namespace not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def test_a_name_tells_pid_and_birth_of_its_owner() -> None:
    match = NAME.fullmatch(Network(1).hosts[0].namespace)
    assert match is not None and int(match["pid"]) == os.getpid()
    assert NAME.fullmatch("blue") is None and NAME.fullmatch("mcclnet-1-h0") is None
