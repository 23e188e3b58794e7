"""All-reduce against a float64 reference: all dtypes and operators, worlds 2 to 9, the same bits on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.algorithms import groups_by_algorithm
from support.digests import digest
from support.ranks import run_ranks

from mccl_core import explain

FLOATS = {torch.float32: 1e-6, torch.float64: 1e-15, torch.float16: 2e-3, torch.bfloat16: 2e-2}
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
ARITHMETIC = ["SUM", "AVG", "PRODUCT", "MIN", "MAX"]
BITWISE = ["BAND", "BOR", "BXOR"]
# Elements. With 8-byte elements the last one is 64 KiB; odd sizes and sizes below the world are among them.
COUNTS = [0, 1, 3, 7, 251, 8192]


def make_input(rank: int, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The same on every rank that asks, so that each can compute the reference."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    if dtype.is_floating_point:
        return (torch.rand(count, generator=generator, dtype=torch.float64) + 0.5).to(dtype)
    return torch.randint(0, 3, (count,), generator=generator).to(dtype)


def reference(inputs: list[torch.Tensor], op: str, factor: float = 1.0) -> torch.Tensor:
    """The result in float64, or in the dtype itself where that is exact."""
    dtype = inputs[0].dtype
    stack = torch.stack(inputs)
    if op in BITWISE:
        combine = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[op]
        result = stack[0]
        for other in stack[1:]:
            result = combine(result, other)
        return result
    if dtype == torch.bool:
        return stack.any(0) if op in ("SUM", "MAX") else stack.all(0)
    wide = stack.to(torch.float64 if dtype.is_floating_point else torch.int64)
    match op:
        case "SUM" | "PREMUL_SUM":
            return (wide * factor).sum(0) if op == "PREMUL_SUM" else wide.sum(0)
        case "AVG":
            if dtype.is_floating_point:
                return wide.mean(0)
            return wide.sum(0).div(len(inputs), rounding_mode="trunc")
        case "PRODUCT":
            return wide.prod(0)
        case "MIN":
            return wide.amin(0)
        case "MAX":
            return wide.amax(0)
    raise AssertionError(op)


def assert_right(result: torch.Tensor, expected: torch.Tensor, op: str, world: int) -> None:
    dtype = result.dtype
    if dtype.is_floating_point:
        # One rounding a reduction: the error grows with the world, relative to the largest partial result.
        torch.testing.assert_close(result.double(), expected.double(), rtol=FLOATS[dtype] * world, atol=0)
    else:
        # Integers wrap as torch's own arithmetic does.
        torch.testing.assert_close(result, expected.to(dtype), rtol=0, atol=0)


def cases() -> list[tuple[torch.dtype, str]]:
    floating = [(dtype, op) for dtype in FLOATS for op in [*ARITHMETIC, "PREMUL_SUM"]]
    integer = [(dtype, op) for dtype in INTEGERS for op in ARITHMETIC + BITWISE]
    logical = [(torch.bool, op) for op in ["SUM", "PRODUCT", "MIN", "MAX", *BITWISE]]
    return floating + integer + logical


def all_cases(rank: int, world: int) -> list[str]:
    digests = []
    groups = groups_by_algorithm(rank, world)
    for seed, (dtype, op) in enumerate(cases()):
        operator = dist._make_nccl_premul_sum(0.75) if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)
        for count in COUNTS:
            inputs = [make_input(r, count, dtype, seed) for r in range(world)]
            summands = [(x * 0.75).to(dtype) for x in inputs] if op == "PREMUL_SUM" else inputs
            expected = reference(summands, "SUM" if op == "PREMUL_SUM" else op)
            for name, group in groups.items():
                result, again = inputs[rank].clone(), inputs[rank].clone()
                works = [dist.all_reduce(t, op=operator, group=group, async_op=True) for t in (result, again)]
                for work in works:
                    work.wait()
                try:
                    assert_right(result, expected, op, world)
                    assert digest(again) == digest(result), "another result on the second run"
                except AssertionError as error:
                    raise AssertionError(f"{name}, {op} of {count} × {dtype}: {error}") from error
                digests.append(digest(result))
    return digests


@pytest.mark.parametrize("world", [2, 3])
def test_every_dtype_op_and_algorithm_is_right_and_bit_identical(world: int) -> None:
    digests = run_ranks(world, all_cases, backend="gloo", timeout_s=200)
    assert all(other == digests[0] for other in digests)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [4, 5, 6, 7, 8, 9])
def test_every_dtype_op_and_algorithm_on_more_worlds(world: int) -> None:
    digests = run_ranks(world, all_cases, backend="gloo", timeout_s=500)
    assert all(other == digests[0] for other in digests)


def around_the_threshold(rank: int, world: int) -> None:
    # Recursive doubling and ring, and sizes that neither world nor segment divides.
    for count in (65535, 65536, 65537, 300_001):
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            inputs = [make_input(r, count, dtype, count) for r in range(world)]
            result = inputs[rank].clone()
            dist.all_reduce(result)
            assert_right(result, reference(inputs, "SUM"), "SUM", world)


@pytest.mark.parametrize("world", [2, 5])
def test_sizes_around_the_algorithms_border(world: int) -> None:
    run_ranks(world, around_the_threshold)


def large(rank: int, world: int) -> list[str]:
    digests = []
    for dtype in (torch.float32, torch.bfloat16):
        count = 25 * 1000 * 1000 // dtype.itemsize + 1
        inputs = [make_input(r, count, dtype, 7) for r in range(world)]
        result = inputs[rank].clone()
        expected = sum((x.double() for x in inputs), torch.zeros(count, dtype=torch.float64))
        del inputs
        dist.all_reduce(result)
        assert_right(result, expected, "SUM", world)
        digests.append(digest(result))
    return digests


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 9])
def test_25_mb(world: int) -> None:
    digests = run_ranks(world, large, timeout_s=200)
    assert all(other == digests[0] for other in digests)


def in_teams(rank: int, world: int) -> list[str]:
    digests = []
    for count in (1, 5, world * 6 + 1, 300_001):
        inputs = [make_input(r, count, torch.float32, count) for r in range(world)]
        result = inputs[rank].clone()
        dist.all_reduce(result)
        assert_right(result, reference(inputs, "SUM"), "SUM", world)
        digests.append(digest(result))
    return digests


@pytest.mark.slow
def test_teams_that_the_planner_cuts() -> None:
    world = 16  # the smallest that it cuts
    names = {candidate.algorithm for candidate in explain("all_reduce", 1, world).candidates}
    assert "two_level" in names
    digests = run_ranks(world, in_teams, MCCL_ALLREDUCE_ALGO="two_level")
    assert all(other == digests[0] for other in digests)


def views(rank: int, world: int) -> None:
    base = torch.arange(4000, dtype=torch.float32).reshape(40, 100)
    for view in (lambda t: t.t(), lambda t: t[::2, 1::3], lambda t: t[:, :1], lambda t: t[3]):
        tensor = base.clone() * (rank + 1)
        untouched = tensor.clone()
        dist.all_reduce(view(tensor))
        expected = untouched.clone()
        view(expected).copy_(view(base) * (world * (world + 1) // 2))
        assert torch.equal(tensor, expected)
    four = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    channels_last = four.to(memory_format=torch.channels_last).clone(memory_format=torch.preserve_format)
    dist.all_reduce(channels_last)
    torch.testing.assert_close(channels_last, four * world)


def test_tensors_that_are_not_contiguous() -> None:
    run_ranks(3, views)


def complex_sum(rank: int, world: int) -> None:
    tensor = torch.full((5,), complex(rank, 1), dtype=torch.complex64)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((5,), complex(sum(range(world)), world), dtype=torch.complex64))
    with pytest.raises(Exception, match=r"max|not defined|does not support"):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)


def test_complex_numbers() -> None:
    run_ranks(2, complex_sum)


def nan_and_zero(rank: int, world: int) -> str:
    special = torch.tensor([float("nan"), 0.0, -0.0, float("inf"), 1.0])
    ordinary = torch.tensor([1.0, -0.0, 0.0, 1.0, float("nan")])
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        tensor = (special if rank == world - 1 else ordinary).clone()
        dist.all_reduce(tensor, op=op)
        assert tensor[0].isnan() and tensor[4].isnan()
    dist.all_reduce(tensor)
    return digest(tensor)


def test_min_and_max_propagate_nan_and_agree_on_signed_zero() -> None:
    digests = run_ranks(3, nan_and_zero)
    assert len(set(digests)) == 1
