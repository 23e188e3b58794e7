"""All-reduces whose result each rank knows beforehand, so that a single wrong bit is seen.

Rank r contributes pattern + addend[r], whole numbers that the dtype holds exactly, as it does all their sums. So the
result is world × pattern + the sum of all addends, whatever the order of the additions. Where in the pattern an op
begins and what each rank adds are drawn anew for each op: what an earlier op has left, and a rank that was left out or
counted twice, are seen as well.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

EXACT = {torch.float32: 2**24, torch.float64: 2**53, torch.bfloat16: 2**8, torch.int64: 2**62}
"""Up to here each whole number is one of the dtype's."""
MOST_RANKS = 64  # more leave bfloat16 too few numbers
SHIFTS = 65536
CHECKED_NBYTES = 256 * 1024  # at once, so that what is expected stays in the cache

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True)
class Op:
    """One all-reduce of `count` elements; the same on all ranks."""

    dtype: torch.dtype
    count: int
    shift: int
    """The element of the pattern that it begins with."""
    addends: tuple[int, ...]
    """By rank."""

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return self.count * self.dtype.itemsize


def _largest(dtype: torch.dtype, world: int) -> int:
    """The largest element of a pattern, and the largest addend: even the sum of all ranks' is exact."""
    return EXACT[dtype] // world // 2


def draw_ops(world: int, least_nbytes: int, most_nbytes: int, seed: int) -> Iterator[Op]:
    """Ops without end, the same ones from the same seed. All sizes of the same magnitude are equally likely."""
    generator = random.Random(seed)
    while True:
        dtype = generator.choice(list(EXACT))
        nbytes = math.exp(generator.uniform(math.log(least_nbytes), math.log(most_nbytes)))
        yield _draw_op(generator, dtype, world, int(nbytes))


def largest_ops(world: int, nbytes: int, seed: int) -> list[Op]:
    """One op of this size for each dtype."""
    generator = random.Random(seed)
    return [_draw_op(generator, dtype, world, nbytes) for dtype in EXACT]


def _draw_op(generator: random.Random, dtype: torch.dtype, world: int, nbytes: int) -> Op:
    largest = _largest(dtype, world)
    addends = tuple(generator.randint(-largest, largest) for _ in range(world))
    return Op(dtype, max(1, nbytes // dtype.itemsize), generator.randrange(SHIFTS), addends)


class KnownSums:
    """Makes what a rank contributes to an op of up to `most_nbytes`, and checks what comes of it.

    Made before the ranks are forked, so that they share the memory of the patterns.
    """

    def __init__(self, world: int, most_nbytes: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._world = world
        self._patterns: dict[torch.dtype, torch.Tensor] = {}
        for dtype in EXACT:
            largest = _largest(dtype, world)
            count = most_nbytes // dtype.itemsize + SHIFTS
            self._patterns[dtype] = torch.randint(-largest, largest + 1, (count,), generator=generator).to(dtype)
        self._scratch = torch.empty(CHECKED_NBYTES, dtype=torch.uint8)

    def touch(self) -> None:
        """Has all memory mapped now, so that a process does not seem to grow later."""
        for pattern in self._patterns.values():
            pattern.view(torch.uint8)[::1024].sum()
        self._scratch.fill_(1)

    def contribute(self, op: Op, rank: int, tensor: torch.Tensor) -> None:
        """Fills `tensor`, of `op.count` elements, with what `rank` contributes."""
        pattern = self._patterns[op.dtype][op.shift : op.shift + op.count]
        torch.add(pattern, op.addends[rank], out=tensor)

    def wrong_bits(self, op: Op, tensor: torch.Tensor) -> int:
        """How many bits of the op's result are not as they should be."""
        pattern = self._patterns[op.dtype][op.shift : op.shift + op.count]
        scratch = self._scratch.view(op.dtype)
        addend = torch.tensor(sum(op.addends), dtype=op.dtype)
        wrong = 0
        for part, result in zip(pattern.split(len(scratch)), tensor.split(len(scratch)), strict=True):
            expected = torch.add(addend, part, alpha=self._world, out=scratch[: len(part)])
            if _memcmp(expected.data_ptr(), result.data_ptr(), expected.nbytes) != 0:
                wrong += _differing_bits(expected, result)
        return wrong


def _differing_bits(one: torch.Tensor, other: torch.Tensor) -> int:
    differing = one.view(torch.uint8).numpy() ^ other.view(torch.uint8).numpy()
    return int(np.unpackbits(differing).sum())
