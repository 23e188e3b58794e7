"""A child process: its output, its end, and that it never outlives its starter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from mccl_ray.process import LoggedProcess, describe_exit, guarded, write_private

pytestmark = pytest.mark.timeout(60)

WITH_A_HELPER = """
import os, subprocess, sys
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), helper.pid, flush=True)
helper.wait()
"""


def is_alive(pid: int) -> bool:
    """False for a zombie too: whoever adopted it may be slow to collect it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start(tmp_path: Path, code: str, **options: object) -> LoggedProcess:
    process = LoggedProcess(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        environ=os.environ,
        log_path=tmp_path / "logs" / "out.log",
        **options,  # type: ignore[arg-type]
    )
    process.start()
    return process


def test_output_goes_to_the_log_and_line_by_line_to_the_listener(tmp_path: Path) -> None:
    lines: list[str] = []
    code = "import sys; print('one', flush=True); print('two', file=sys.stderr); sys.exit(3)"
    process = start(tmp_path, code, on_line=lines.append)
    assert process.wait() == 3
    assert lines == process.tail() == ["one", "two"]
    assert (tmp_path / "logs" / "out.log").read_text() == "one\ntwo\n"


def test_only_the_end_of_a_long_output_is_remembered(tmp_path: Path) -> None:
    process = start(tmp_path, "for i in range(1000): print(i)")
    process.wait()
    assert process.tail()[-1] == "999"
    assert len(process.tail()) == 20


def test_the_end_is_told_when_the_group_is_dead(tmp_path: Path) -> None:
    ended = Event()
    codes: list[int] = []

    def on_exit(returncode: int) -> None:
        codes.append(returncode)
        ended.set()

    process = start(tmp_path, WITH_A_HELPER, on_exit=on_exit)
    wait_until(lambda: len(process.tail()) == 1)
    pids = [int(word) for word in process.tail()[0].split()]
    os.kill(pids[0], signal.SIGKILL)
    assert ended.wait(10)
    assert codes == [-signal.SIGKILL]
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_starter_takes_the_program_its_helpers_and_the_folder_with_it(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "secret").touch()
    starter = (
        "import subprocess, sys\n"
        "from pathlib import Path\n"
        "from mccl_ray.process import guarded\n"
        f"command = guarded([sys.executable, '-c', {WITH_A_HELPER!r}], cleanup=Path({str(private)!r}))\n"
        "subprocess.Popen(command, start_new_session=True).wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert all(map(is_alive, pids))
        process.kill()
    wait_until(lambda: not any(map(is_alive, pids)))
    wait_until(lambda: not private.exists())


def test_the_program_keeps_its_process_id_and_sees_no_strange_child(tmp_path: Path) -> None:
    code = "import os\ntry:\n    os.waitpid(-1, os.WNOHANG)\nexcept ChildProcessError:\n    print(os.getpid())"
    process = start(tmp_path, code)
    process.wait()
    assert process.tail() == [str(process.pid)]


def test_a_guard_without_its_parent_starts_nothing(tmp_path: Path) -> None:
    command = guarded([sys.executable, "-c", "print('started')"])
    command[command.index(str(os.getpid()))] = "1"
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize(("returncode", "words"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "killed by SIGKILL")])
def test_an_exit_is_put_in_words(returncode: int, words: str) -> None:
    assert describe_exit(returncode) == words


def test_a_private_file_is_for_its_owner_and_never_overwritten(tmp_path: Path) -> None:
    write_private(tmp_path / "secret", b"x")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "secret", b"y")
