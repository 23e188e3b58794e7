"""benchmarks/shaped.py from its command line to its result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_result_states_its_link_and_its_figures(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    options = "--world 3 --rate 100 --burst 16384 --sizes 4096 262144 --in-flight 2 --seconds 0.2 --iperf-seconds 1"
    profile = tmp_path / "link.yaml"
    profile.write_text("latency_us: 200\nstep_us: 10\ngoodput_GBps: 0.012\n")
    options += f" --link-profile {profile}"
    command = [sys.executable, "benchmarks/shaped.py", *options.split(), "--markdown", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert {"hardware", "system", "commit", "command", "torch"} <= result.keys()
    assert "100 Mbit/s, burst 16384 bytes" in result["link"] and result["shaping"]["mtu"] == 1500
    assert result["link_profile"]["goodput_GBps"] == 0.012
    assert result["algorithms"].keys() == {"4096", "262144"}
    assert [row["bytes"] for row in result["rows"]] == [4096, 262144]
    for row in result["rows"]:
        for name in ("mccl", "gloo"):
            batch_nbytes = 2 * row["bytes"]
            on_wire = 4 / 3 * batch_nbytes
            moved = row[f"{name}_batches"] * on_wire / 16384
            assert row[f"{name}_bursts_moved"] == pytest.approx(moved)
            # 4 KiB fit the burst: they are repeated, however little that moves.
            assert moved >= 100 if row["bytes"] == 262144 else row[f"{name}_batches"] >= 50
            assert row[f"{name}_busbw_GBps"] == pytest.approx(on_wire / 1e6 / row[f"{name}_ms"])
            assert row[f"{name}_share"] == pytest.approx(
                row[f"{name}_busbw_GBps"] / max(result["shaping"]["iperf3_GBps"])
            )
            assert row[f"{name}_cpu_s_per_GB"] > 0
    assert "| 3 | 2 × 256 KiB |" in done.stdout


@pytest.mark.slow
def test_a_profile_is_measured_on_the_same_links(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    options = "--world 3 --rate 100 --mtu 9000 --burst 73728 --sizes 65536 --seconds 0.2 --iperf-seconds 1 --tune"
    command = [sys.executable, "benchmarks/shaped.py", *options.split(), "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    # 100 Mbit/s carry 12.4 MB of payload a second; nothing else on this machine is as slow.
    assert result["link_profile"]["goodput_GBps"] == pytest.approx(0.0124, rel=0.4)
    assert result["link_profile_from"] == "tuned on these links, first"
    assert {point["algorithm"] for point in result["tuned_to"]} == {"ring", "recursive_doubling", "circulant"}
