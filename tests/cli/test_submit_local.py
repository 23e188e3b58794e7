"""`submit` without a head: a fleet of this machine, real Ray, real processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Command
from support.digits import DIGITS

from mccl_ray import exitcodes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

REPORTED_WITHIN_S = 5.0
SLEEPER = "import os, time\nprint('rank', os.environ['RANK'], flush=True)\ntime.sleep(600)\n"


def digits_job(write_job: Callable[..., str], epochs: int) -> str:
    args = ["--epochs", epochs, "--log-dir", "{run_dir}/metrics"]
    return write_job(DIGITS, name="digits", args=args, workers=2)


def test_the_digits_survive_the_loss_of_a_script_and_of_a_worker(
    start: Callable[..., Command], write_job: Callable[..., str], tmp_path: Path
) -> None:
    command = start("submit", digits_job(write_job, epochs=12))
    workers = command.until("workers")["workers"]
    assert [worker["rank"] for worker in workers] == [0, 1]
    assert len({worker["ip"] for worker in workers}) == 2
    command.until("started", count=2)
    script = next(event["pid"] for event in command.of("started") if event["rank"] == 1)
    command.until("checkpoint", count=4)
    killed_at = time.time()
    os.kill(script, signal.SIGKILL)
    lost = command.until("worker_died")
    assert lost["read_at"] - killed_at < REPORTED_WITHIN_S
    assert (lost["rank"], lost["what"], lost["how"]) == (1, "script", "killed by SIGKILL")
    assert lost["host"] == workers[1]["host"]
    assert lost["ip"] == workers[1]["ip"]
    restart = command.until("restarting")
    assert restart["checkpoint_step"] > 0
    assert f"rank 1 on {workers[1]['host']}" in restart["cause"]

    workers = command.until("workers")["workers"]
    steps = [command.until("step")["step"] for _ in range(2)]
    assert min(steps) > restart["checkpoint_step"]
    command.until("checkpoint", count=2)
    killed_at = time.time()
    os.kill(workers[0]["pid"], signal.SIGKILL)
    while (lost := command.until("worker_died"))["what"] != "worker":
        pass
    assert lost["read_at"] - killed_at < REPORTED_WITHIN_S
    assert (lost["rank"], lost["host"]) == (0, workers[0]["host"])

    assert command.finish() == exitcodes.OK, command.errors()
    result = command.events[-1]
    assert (result["event"], result["status"], result["restarts"]) == ("result", "finished", 2)
    assert result["metrics"]["val_acc"] >= 0.95
    assert result["samples_per_s"] > 0
    assert result["bytes_all_reduced"] > 0
    assert result["all_reduces"] > 0
    assert Path(result["checkpoint"], "checkpoint.ckpt").is_file()
    run = tmp_path / "runs" / result["run"]
    assert json.loads((run / "result.json").read_text())["metrics"] == result["metrics"]
    assert "restarting" in (run / "events.jsonl").read_text()
    assert (run / "logs" / "rank-1.log").is_file()
    command.assert_nothing_left()
    secrets = [path for path in run.rglob("*") if path.name == "secret"]
    assert secrets == []


def test_a_job_that_may_not_fail_ends_with_the_cause(
    start: Callable[..., Command], write_job: Callable[..., str]
) -> None:
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no such data set')\ntime.sleep(600)\n"
    command = start("submit", write_job(code, workers=2, max_failures=0))
    assert command.finish() == exitcodes.FAILED
    error = command.events[-1]["error"]
    assert "rank 1 on local-mac-" in error
    assert "exit code 1: no such data set" in error
    assert "Traceback" not in command.errors()
    assert command.of("restarting") == []
    command.assert_nothing_left()


def test_ranks_with_different_secrets_fail_with_one_line_that_says_so(
    start: Callable[..., Command], write_job: Callable[..., str]
) -> None:
    code = (
        "import os, pathlib\n"
        "own = pathlib.Path(os.environ['MCCL_SECRET_FILE'])\n"
        "own.write_text('the secret of rank ' + os.environ['RANK'] * 16)\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('mccl')\n"
    )
    command = start("submit", write_job(code, workers=2, max_failures=0))
    assert command.finish() == exitcodes.FAILED
    error = command.events[-1]["error"]
    assert "DistBackendError" in error
    assert "authentication failed" in error
    assert len(error.splitlines()) == 1
    command.assert_nothing_left()


def test_a_second_backend_of_the_name_is_refused_before_anything_starts(
    start: Callable[..., Command], write_job: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "elsewhere.py").write_text(
        "def register():\n"
        "    import torch.distributed as dist\n"
        "    dist.Backend.register_backend('mccl', lambda *args: None, devices=['cpu'])\n"
    )
    metadata = tmp_path / "elsewhere-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nelsewhere = elsewhere:register\n")
    command = start("submit", write_job("", workers=2), PYTHONPATH=str(tmp_path))
    assert command.finish() == exitcodes.BAD_INPUT
    assert command.events == []
    assert "the torch.distributed backend 'mccl' is already registered by elsewhere" in command.errors()
    assert "Traceback" not in command.errors()
    command.assert_nothing_left()


@pytest.mark.parametrize(
    ("signum", "status"),
    [
        (signal.SIGINT, exitcodes.INTERRUPTED),
        (signal.SIGTERM, exitcodes.TERMINATED),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_no_process_outlives_the_command(
    start: Callable[..., Command], write_job: Callable[..., str], signum: signal.Signals, status: int
) -> None:
    command = start("submit", write_job(SLEEPER, workers=2))
    command.until("output")
    scripts = [line for line in command.living().values() if "script.py" in line]
    assert len(scripts) >= 2
    command.process.send_signal(signum)
    assert command.finish() == status
    command.assert_nothing_left()
    assert "Traceback" not in command.errors()


def test_a_command_interrupted_while_its_fleet_starts_leaves_nothing(
    start: Callable[..., Command], write_job: Callable[..., str]
) -> None:
    command = start("submit", write_job(SLEEPER, workers=2))
    command.until("fleet")
    command.process.send_signal(signal.SIGINT)
    assert command.finish() == exitcodes.INTERRUPTED
    command.assert_nothing_left()


def test_the_script_gets_its_arguments_folder_variables_and_a_secret_of_its_own(
    start: Callable[..., Command], write_job: Callable[..., str], tmp_path: Path
) -> None:
    code = (
        "import json, os, stat, sys\n"
        "path = os.environ['MCCL_SECRET_FILE']\n"
        "print('FACTS', json.dumps(dict(argv=sys.argv, cwd=os.getcwd(), depth=os.environ['DEPTH'],\n"
        "    world=os.environ['WORLD_SIZE'], master=os.environ['MASTER_ADDR'],\n"
        "    segment=os.environ['MCCL_SEGMENT_NBYTES'], host=os.environ['MCCL_HOST_NAME'],\n"
        "    mode=stat.S_IMODE(os.stat(path).st_mode), secret=len(open(path).read()),\n"
        "    threads=os.environ.get('OMP_NUM_THREADS'))), flush=True)\n"
    )
    job = write_job(code, args=["a b", 3], env={"DEPTH": 7}, core={"segment_nbytes": 65536})
    command = start("submit", job, "--local-macs", "1")
    assert command.finish() == exitcodes.OK, command.errors()
    line = next(event["text"] for event in command.of("output") if event["text"].startswith("FACTS"))
    assert json.loads(line.removeprefix("FACTS ")) == {
        "argv": [str(tmp_path / "script.py"), "a b", "3"],
        "cwd": str(tmp_path),
        "depth": "7",
        "world": "1",
        "master": "127.0.0.2",
        "segment": "65536",
        "host": "local-mac-1",
        "mode": 0o600,
        "secret": 64,
        "threads": None,
    }
    command.assert_nothing_left()
