"""The example for two Macs, with mps replaced by cpu and nothing else, on two hosts of one link."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from netns.host import Host
from netns.network import Network
from netns.ranks import STORE_PORT

SCRIPT = Path(__file__).parents[2] / "examples/two_macs/train.py"
LIMIT_S = 200


def start(host: Host, rank: int, first: Host, script: Path) -> subprocess.Popen[str]:
    """What the example says to type, on one host."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    place = ["--node_rank", str(rank), "--master_addr", first.address, "--master_port", str(STORE_PORT)]
    return host.popen(
        [*launcher, *place, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=script.parent,
        start_new_session=True,
    )


@pytest.mark.slow
def test_the_example_trains_on_two_hosts(tmp_path: Path) -> None:
    text = SCRIPT.read_text()
    on_cpu = text.replace('torch.device("mps")', 'torch.device("cpu")')
    changed = [(a, b) for a, b in zip(text.splitlines(), on_cpu.splitlines(), strict=True) if a != b]
    assert len(changed) == 1, changed
    script = tmp_path / "train.py"
    script.write_text(on_cpu)
    # Leaving the network ends whatever still runs in it.
    with Network(2, mtu=9000) as network:
        hosts = network.hosts
        ranks = [start(host, rank, hosts[0], script) for rank, host in enumerate(hosts)]
        said = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss ([0-9.]+)", said[0][0])]
    assert len(losses) == 5 and losses[-1] < losses[0] / 2, losses
    norms = [re.search(r"rank \d: 74497 weights, norm ([0-9.]+)", out) for out, _ in said]
    assert norms[0] and norms[1] and norms[0].group(1) == norms[1].group(1), "the Macs' models differ"
    for _, err in said:
        assert "for Thunderbolt: segment_nbytes=2097152" in err
        assert re.search(r"all_reduce, \w+: [0-9,]+ ops, [0-9.]+ MB", err), err
