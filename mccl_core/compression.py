"""How the gradients of one process group travel: the job's settings under the group's own (docs/compression.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from mccl_core.config import CompressionName, CoreConfig


class Options(BaseModel):
    """What one process group does differently from its job: `new_group(ranks, pg_options=mccl_core.Options(...))`.

    Unset fields are the job's. All ranks of a group must give the same. A group that is made with a compression
    compresses reductions of every size, and refuses all-reduces and reduce-scatters that cannot be compressed; one that
    only inherits the job's leaves those, and small ones, as they are.

    Raises:
        pydantic.ValidationError: names the field, the value and the range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    compression: CompressionName | None = Field(default=None, description="`none`, `fp16`, `bf16` or `topk`.")
    topk_ratio: float | None = Field(
        default=None, gt=0, le=1, description="Share of a tensor's elements that topk sends."
    )
    topk_warmup: int | None = Field(
        default=None, ge=0, le=2**63 - 1, description="All-reduces of each size that go whole before topk begins."
    )


@dataclass(frozen=True)
class GroupCompression:
    """What holds for one group. Its text names all that the ranks must agree on."""

    compression: CompressionName
    required: bool  # asked for by the group's own options
    min_nbytes: int
    topk_ratio: float
    topk_warmup: int

    @classmethod
    def of(cls, config: CoreConfig, options: Options | None) -> Self:
        """The job's settings, but for what the group's options set."""
        options = options or Options()
        return cls(
            compression=options.compression or config.compression,
            required=options.compression not in (None, "none"),
            min_nbytes=config.compression_min_nbytes,
            topk_ratio=config.topk_ratio if options.topk_ratio is None else options.topk_ratio,
            topk_warmup=config.topk_warmup if options.topk_warmup is None else options.topk_warmup,
        )

    def options(self) -> Options | None:
        """What makes another group travel as this one; None where the job's settings alone do."""
        if not self.required:
            return None
        return Options(compression=self.compression, topk_ratio=self.topk_ratio, topk_warmup=self.topk_warmup)

    def __str__(self) -> str:
        if self.compression == "none":
            return "none"
        text: str = self.compression
        if self.compression == "topk":
            text += f" (ratio {self.topk_ratio!r}, after {self.topk_warmup} whole all-reduces)"
        return text + (" for all reductions" if self.required else f" from {self.min_nbytes} bytes on")

    def core_options(self) -> dict[str, Any]:
        """The fields of the C++ struct `CompressionOptions`."""
        return {
            "compression": self.compression,
            "required": self.required,
            "min_nbytes": self.min_nbytes,
            "topk_ratio": self.topk_ratio,
            "topk_warmup": self.topk_warmup,
        }
