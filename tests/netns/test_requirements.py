"""Where namespaces cannot be used, the tests say what to install: they skip, but fail in CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from netns import requirements

ROOT = Path(__file__).parents[2]


def test_missing_tools_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = requirements.unmet_requirement()
    assert reason is not None
    assert "ip, tc, nft, iperf3" in reason and "iperf3 iproute2 nftables" in reason


def test_root_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in str(requirements.unmet_requirement())


@pytest.mark.slow
@pytest.mark.parametrize(("ci", "status", "summary"), [("true", 1, "1 error"), ("", 0, "1 skipped")])
def test_without_the_tools_tests_are_skipped_but_fail_in_ci(tmp_path: Path, ci: str, status: int, summary: str) -> None:
    test = "tests/netns/test_names.py::test_a_name_tells_pid_and_birth_of_its_owner"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test],
        cwd=ROOT,
        env=os.environ | {"PATH": str(tmp_path), "CI": ci},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status and summary in done.stdout, done.stdout
    assert "install the Debian packages iperf3 iproute2 nftables" in done.stdout
