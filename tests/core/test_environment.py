"""The variables of guides: each is honoured, or says once what there is instead."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from mccl_core._environment import KNOWN, remarks
from mccl_core.config import CoreConfig
from mccl_core.settings import SettingsError
from mccl_core.variables import ALIASES, JOB_VARIABLES, REPLACED
from mccl_ray.config import CheckpointSpec, JobSpec

OF_GUIDES = [
    "MCCL_TRANSPORT",
    "MCCL_LISTEN_ADDR",
    "MCCL_PORT_BASE",
    "MCCL_IFNAME",
    "MCCL_CHUNK_BYTES",
    "MCCL_SMALL_MSG_THRESHOLD",
    "MCCL_CONNECT_TIMEOUT_MS",
    "MCCL_SOCK_BUFSIZE",
    "MCCL_TCP_LOWAT",
    "MCCL_LINK_PROFILE",
    "MCCL_TRANSPORT_CRC",
    "MCCL_EVENT_SYNC",
    "MCCL_OVERLAP_COMM",
    "MCCL_COMPRESSION",
    "MCCL_TOPK_RATIO",
    "MCCL_LOG_LEVEL",
    "MCCL_WATCHDOG_TIMEOUT_MS",
    "MCCL_HEARTBEAT_INTERVAL_MS",
    "MCCL_MAX_QUEUE_DEPTH",
    "MCCL_UNIFIED_COLLECTIVE",
    "MCCL_PIPELINE_DEPTH",
    "MCCL_SYNC_MODE",
    "MCCL_FAST_MATH",
    "MCCL_GPU_THRESHOLD",
    "MCCL_FP32_CPU_REDUCE",
    "MCCL_SHADER_PATH",
    "MCCL_ALLREDUCE_ALGO",
    "MCCL_RING_ALGO",
    "DDP_BUCKET_MB",
]


@pytest.mark.parametrize("name", OF_GUIDES)
def test_each_variable_of_the_guides_does_something_or_says_what_does(name: str) -> None:
    if name in KNOWN:
        assert name not in REPLACED
        assert list(remarks({name: "1"})) == []
    else:
        assert list(remarks({name: "1"})) == [(name, f"{name} has no effect: {REPLACED[name]}")]


def test_the_table_fits_the_fields() -> None:
    assert set(ALIASES.values()) <= set(CoreConfig.model_fields), "an alias of a field that is not there"
    assert not KNOWN & set(REPLACED), "these have become fields: remove their lines from mccl_core/variables.py"


def test_the_jobs_variables_are_known() -> None:
    of_job = {f"MCCL_{name.upper()}" for name in JobSpec.model_fields if name not in ("core", "checkpoint")}
    of_job |= {f"MCCL_CHECKPOINT_{name.upper()}" for name in CheckpointSpec.model_fields}
    assert of_job == JOB_VARIABLES
    assert list(remarks(dict.fromkeys([*JOB_VARIABLES, "MCCL_FLEET", "MCCL_FLEET_DRAIN_FILE", "PATH"], "1"))) == []


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("MCCL_PORT_BSE", "did you mean MCCL_PORT_BASE?"),
        ("MCCL_SOCK_BUFFSIZE", "did you mean MCCL_SOCK_BUFSIZE?"),
        ("MCCL_QWERTZUIOP", "docs/environment.md lists those that there are"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one(name: str, remedy: str) -> None:
    assert list(remarks({name: "1"})) == [(name, f"{name} has no effect: there is no such variable; {remedy}")]


VALUES = {
    "DDP_BUCKET_MB": ("ddp_bucket_mb", "12.5", 12.5),
    "MCCL_CHUNK_BYTES": ("segment_nbytes", "65536", 65536),
    "MCCL_SMALL_MSG_THRESHOLD": ("recursive_doubling_max_nbytes", "1024", 1024),
    "MCCL_SOCK_BUFSIZE": ("socket_buffer_nbytes", "100000", 100000),
    "MCCL_WATCHDOG_TIMEOUT_MS": ("op_timeout_ms", "5000", 5000),
    "MCCL_LOG_LEVEL": ("log_level", "INFO", "info"),
    "MCCL_ALLREDUCE_ALGO": ("allreduce_algo", "Ring", "ring"),
}


def test_every_alias_sets_its_field() -> None:
    assert set(ALIASES) <= set(VALUES)
    for name, (field, text, value) in VALUES.items():
        assert getattr(CoreConfig.from_environment({name: text}), field) == value


def test_the_fields_own_variable_wins_and_errors_name_the_one_that_was_set() -> None:
    both = {"MCCL_SOCK_BUFSIZE": "1000", "MCCL_SOCKET_BUFFER_NBYTES": "2000"}
    assert CoreConfig.from_environment(both).socket_buffer_nbytes == 2000
    with pytest.raises(SettingsError, match=r"segment_nbytes: '1' \(environment MCCL_CHUNK_BYTES\) should be greater"):
        CoreConfig.from_environment({"MCCL_CHUNK_BYTES": "1"})


class Lines(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def said(rank: int, world: int) -> list[str]:
    handler = Lines()
    logging.getLogger("mccl").addHandler(handler)
    for _ in range(2):
        dist.all_reduce(torch.ones(1), group=dist.new_group(backend="mccl"))
    return handler.texts


def test_one_rank_of_a_machine_says_it_once() -> None:
    texts = run_ranks(2, said, backend="gloo", MCCL_TCP_LOWAT="1", MCCL_PORT_BSE="1")
    assert texts[1] == []
    assert texts[0] == [
        "mccl: MCCL_PORT_BSE has no effect: there is no such variable; did you mean MCCL_PORT_BASE?",
        "mccl: MCCL_TCP_LOWAT has no effect: " + REPLACED["MCCL_TCP_LOWAT"],
    ]
