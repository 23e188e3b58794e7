"""Configuration of the core. Each default stands here, once; C++ receives the whole as its `Options`."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from mccl_core.settings import resolve
from mccl_core.variables import ALIASES

KIB = 1024
MIB = 1024 * KIB
Nbytes = Annotated[int, Field(ge=0)]
AnyCase = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
CompressionName = Literal["none", "fp16", "bf16", "topk"]


class CoreConfig(BaseModel):
    """Options of the engine and of how ranks find each other; from MCCL_<FIELD> in the environment.

    docs/environment.md has them as a table.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    environment_aliases: ClassVar[Mapping[str, str]] = ALIASES

    segment_nbytes: int = Field(MIB, ge=4 * KIB, le=16 * MIB, description="Largest payload of one frame, in bytes.")
    scratch_nbytes: int = Field(
        256 * KIB,
        ge=16 * KIB,
        le=16 * MIB,
        description="Receive scratch of one connection, in bytes; should fit a core's cache.",
    )
    inline_nbytes: Nbytes = Field(
        256 * KIB,
        description="Ops up to this many bytes, and the first bytes of larger ones, are sent without waking the "
        "transmit thread.",
    )
    credit_nbytes: int = Field(
        4 * MIB,
        ge=64 * KIB,
        description="What one connection may send before the receiver is ready for it, in bytes.",
    )
    eager_grant_nbytes: Nbytes = Field(
        4 * MIB, description="From this size on a receiver grants a stream as soon as it is ready for it."
    )
    allreduce_algo: Annotated[Literal["auto", "ring", "recursive_doubling", "circulant", "two_level"], AnyCase] = Field(
        "auto", description="Algorithm of all-reduce wherever it can be used; `auto` takes the link profile's fastest."
    )
    link_profile: str | None = Field(
        None, description="Link profile: a file from `mccl-fleet tune`, `ethernet-10g` or `loopback`."
    )
    switch_group: str = Field("", description="Name of the switch that this rank is behind; for two-level all-reduce.")
    recursive_doubling_max_nbytes: int = Field(
        256 * KIB, ge=0, le=4 * MIB, description="Recursive doubling is used up to this size: it keeps it in memory."
    )
    chunk_nbytes: int = Field(
        MIB,
        ge=KIB,
        le=64 * MIB,
        description="A circulant all-reduce goes in chunks of this size, a two-level one in none that are smaller.",
    )
    channels: int | None = Field(
        None,
        ge=1,
        le=8,
        description="The most pairs of a transmit and a receive thread, with connections of their own, that a "
        "collective is spread over; by default what the link profile says. The same on all ranks.",
    )
    channel_nbytes: int = Field(
        256 * KIB, ge=KIB, description="Of a collective's bytes, the least that a channel gets if there are several."
    )
    compression: CompressionName = Field(
        "none", description="How floating-point gradients travel: all-reduces, and with fp16 and bf16 reduce-scatters."
    )
    compression_min_nbytes: Nbytes = Field(
        64 * KIB, description="Smaller reductions go as they are, so that losses and metrics stay exact."
    )
    topk_ratio: float = Field(0.01, gt=0, le=1, description="Share of a tensor's elements that topk sends.")
    topk_warmup: int = Field(
        100, ge=0, le=2**63 - 1, description="All-reduces of each size that go whole before topk begins."
    )
    socket_buffer_nbytes: int = Field(
        0, ge=0, le=1024 * MIB, description="Socket buffers, in bytes; 0 leaves it to the system."
    )
    op_timeout_ms: int | None = Field(
        None,
        ge=1,
        description="Limit for an op of a group that was made without a timeout, in ms; unset: torch's, 30 minutes.",
    )
    ddp_bucket_mb: float | None = Field(
        None,
        gt=0,
        description="Buckets of DistributedDataParallel where the script gives no `bucket_cap_mb`, in MiB; unset: "
        "torch's, 25.",
    )
    flight_record_ops: int = Field(
        256, ge=0, le=1 << 20, description="So many of the latest ops are remembered, for `mccl_core.flight_record()`."
    )
    flight_record_file: str | None = Field(
        None,
        description="Where a rank writes its flight record when a group fails; `{rank}` and `{pid}` are replaced. "
        "`log` writes it to the logger `mccl` instead.",
    )
    linger_ms: int = Field(1000, ge=0, description="Longest wait at exit for peers to take what was sent.")
    heartbeat_interval_ms: int = Field(
        5000,
        ge=10,
        le=3_600_000,
        description="How often an idle connection carries a sign of life; a peer that is silent for three is lost.",
    )

    transport: Literal["auto", "tcp"] = Field(
        "auto",
        description="`auto` takes Unix sockets between processes of one machine and TCP otherwise; `tcp` always.",
    )
    transport_crc: bool = Field(
        False, description="Payloads carry a CRC-32C, and what is damaged is an error. The same on all ranks."
    )
    ifname: str | None = Field(
        None, description="Interface to listen on; of several, with commas between, the first that is up."
    )
    listen_addr: str | None = Field(
        None, description="Address to listen on; by default the one that reaches the store's host."
    )
    port_base: int = Field(
        29600,
        ge=1,
        le=65535,
        description="The first port tried is this plus the local rank; the next free one is taken.",
    )
    local_rank: int = Field(0, ge=0, description="This rank's number on its machine; LOCAL_RANK, where that is set.")
    connect_timeout_ms: int = Field(30_000, ge=1, description="Limit for connecting to one peer.")
    handshake_timeout_ms: int = Field(5_000, ge=1, description="Limit for a stranger to prove who it is.")
    host_name: str = Field(default_factory=socket.gethostname, description="How errors and tables call this machine.")

    metrics_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Serve the metrics for Prometheus at /metrics on this port plus the local rank, or the next free "
        "one, so that ranks of one machine get one each; unset: do not.",
    )

    secret: SecretStr | None = Field(None, description="The job's secret; at least 16 characters.")
    secret_file: Path | None = Field(
        None, description="A file that holds the job's secret; nobody but its owner may read it."
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], AnyCase] = Field(
        "warning", description="What the core says on its logger, `mccl`."
    )

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        if self.secret is not None and self.secret_file is not None:
            raise ValueError("set either secret (MCCL_SECRET) or secret_file (MCCL_SECRET_FILE), not both")
        if self.secret is not None and len(self.secret.get_secret_value()) < 16:
            raise ValueError("secret (MCCL_SECRET) must have at least 16 characters; try `openssl rand -hex 32`")
        return self

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> CoreConfig:
        """Reads MCCL_<FIELD> variables and their other names; without `environ` this process's, under `choose`d ones.

        Raises:
            SettingsError: a value is out of range; the text names the variable, the value and the range.
        """
        given = os.environ if environ is None else environ
        if given.get("LOCAL_RANK", "").isdecimal():  # as launchers set it
            given = {"MCCL_LOCAL_RANK": given["LOCAL_RANK"], **given}
        return resolve(cls, environ=given, arguments=_chosen if environ is None else None).values

    def wire_settings(self) -> dict[str, int]:
        """What both ends of a connection must agree on, by field."""
        return {name: int(getattr(self, name)) for name in ("credit_nbytes", "transport_crc")}

    def engine_options(self) -> dict[str, int]:
        """The fields of the C++ struct `Options`."""
        names = (
            "segment_nbytes",
            "scratch_nbytes",
            "inline_nbytes",
            "credit_nbytes",
            "eager_grant_nbytes",
            "socket_buffer_nbytes",
            "flight_record_ops",
            "linger_ms",
            "heartbeat_interval_ms",
            "transport_crc",
        )
        return {name: getattr(self, name) for name in names}

    def read_secret(self) -> bytes | None:
        """Returns the job's secret, or None where none was given.

        Raises:
            ValueError: the file is missing, too open, or too short; the text says what to do.
        """
        if self.secret is not None:
            return self.secret.get_secret_value().encode()
        if self.secret_file is None:
            return None
        path = self.secret_file
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            secret = path.read_bytes().strip()
        except OSError as error:
            raise ValueError(
                f"secret_file (MCCL_SECRET_FILE): cannot read {path}: {error.strerror}; "
                "create it with `openssl rand -hex 32` and mode 0600 on every rank"
            ) from error
        if mode & 0o077:
            raise ValueError(
                f"secret_file (MCCL_SECRET_FILE): {path} has mode {mode:04o}, so others can read it; "
                f"run `chmod 600 {path}`"
            )
        if len(secret) < 16:
            raise ValueError(
                f"secret_file (MCCL_SECRET_FILE): {path} holds {len(secret)} characters, at least 16 are needed; "
                "try `openssl rand -hex 32`"
            )
        return secret


_chosen: dict[str, Any] = {}


def choose(settings: Mapping[str, Any], *, over_environment: bool) -> dict[str, Any]:
    """Sets fields of `CoreConfig` for the groups that this process makes from now on.

    Args:
        settings: field → value.
        over_environment: whether they win over variables and what was chosen before.

    Returns:
        Those that were set.

    Raises:
        SettingsError: a field is unknown or a value out of range; nothing has been set.
    """
    chosen = dict(settings)
    if not over_environment:
        sources = resolve(CoreConfig, environ=os.environ, arguments=_chosen).sources
        chosen = {name: value for name, value in settings.items() if sources.get(name, "default") == "default"}
    resolve(CoreConfig, environ=os.environ, arguments={**_chosen, **chosen})
    _chosen.update(chosen)
    return chosen


def environment() -> dict[str, str]:
    """A copy of this process's variables: this module alone reads them."""
    return dict(os.environ)


def master_host(environ: Mapping[str, str] | None = None) -> str | None:
    """MASTER_ADDR, the store's host where a launcher has set it."""
    return (os.environ if environ is None else environ).get("MASTER_ADDR") or None
