"""fp16 and bf16 on the wire: close to the exact sum, the same bits on all ranks, half the bytes, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.algorithms import groups_by_algorithm
from support.digests import digest
from support.ranks import run_ranks

import mccl_core

ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # largest relative error of one rounding
# Elements: below the world, odd, and several segments. The last one is in several chunks of a circulant all-reduce.
COUNTS = [1, 3, 7, 251, 8192, 70_001]


def compressed_group(compression: str, **options: Any) -> dist.ProcessGroup:
    return dist.new_group(backend="mccl", pg_options=mccl_core.Options(compression=compression, **options))


def make_input(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """From 0.5 to 1.5: no partial sum is larger than the sum. The same on every rank that asks."""
    generator = torch.Generator().manual_seed(1000 * count + rank)
    if dtype.is_complex:
        return torch.complex(*(torch.rand(2, count, generator=generator, dtype=torch.float64) + 0.5)).to(dtype)
    return (torch.rand(count, generator=generator, dtype=torch.float64) + 0.5).to(dtype)


def operator_of(op: str) -> Any:
    return dist._make_nccl_premul_sum(0.75) if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)


def reference(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    factor = {"SUM": 1.0, "AVG": 1 / len(inputs), "PREMUL_SUM": 0.75}[op]
    wide = torch.complex128 if inputs[0].is_complex() else torch.float64
    return torch.stack(inputs).to(wide).sum(0) * factor


def all_reduce_cases(rank: int, world: int, counts: list[int]) -> list[str]:
    digests = []
    for compression, rounding in ROUNDING.items():
        for name, group in groups_by_algorithm(rank, world, mccl_core.Options(compression=compression)).items():
            for dtype in (torch.float32, torch.float64, torch.complex64):
                for op in ("SUM", "AVG", "PREMUL_SUM"):
                    for count in counts:
                        inputs = [make_input(r, count, dtype) for r in range(world)]
                        result, again = inputs[rank].clone(), inputs[rank].clone()
                        works = [
                            dist.all_reduce(t, op=operator_of(op), group=group, async_op=True) for t in (result, again)
                        ]
                        for work in works:
                            work.wait()
                        expected = reference(inputs, op)
                        # Each rank rounds what it sends, once, and the last one the sum.
                        torch.testing.assert_close(
                            result.to(expected.dtype), expected, rtol=rounding * world, atol=0,
                            msg=lambda text, at=(compression, name, dtype, op, count): f"{at}: {text}",
                        )  # fmt: skip
                        assert digest(again) == digest(result), "another result on the second run"
                        digests.append(digest(result))
    return digests


@pytest.mark.parametrize("world", [2, 3])
def test_all_reduce_is_close_and_bit_identical(world: int) -> None:
    digests = run_ranks(world, all_reduce_cases, COUNTS, backend="gloo", timeout_s=200)
    assert all(other == digests[0] for other in digests)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [4, 5, 6, 7, 8, 9])
def test_all_reduce_on_more_worlds(world: int) -> None:
    digests = run_ranks(world, all_reduce_cases, COUNTS, backend="gloo", timeout_s=500)
    assert all(other == digests[0] for other in digests)


def large(rank: int, world: int) -> tuple[str, float]:
    group = compressed_group("bf16")
    count = 25_000_000 // 4 + 1
    result = make_input(rank, count)
    expected = sum((make_input(r, count).double() for r in range(world)), torch.zeros(count, dtype=torch.float64))
    mccl_core.reset_metrics()
    dist.all_reduce(result, group=group)
    compressed = mccl_core.get_metrics()["ops"]["all_reduce"]
    torch.testing.assert_close(result.double(), expected, rtol=ROUNDING["bf16"] * world, atol=0)
    whole = make_input(rank, count)
    mccl_core.reset_metrics()
    dist.all_reduce(whole)
    uncompressed = mccl_core.get_metrics()["ops"]["all_reduce"]
    assert compressed["bytes"] == uncompressed["bytes"] == 4 * count
    return digest(result), compressed["sent_bytes"] / uncompressed["sent_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 9])
def test_25_mb_are_half_the_bytes_on_the_wire(world: int) -> None:
    results = run_ranks(world, large, timeout_s=200)
    assert len({bits for bits, _ in results}) == 1
    assert all(share <= 0.501 for _, share in results)


def reduce_scatter_cases(rank: int, world: int) -> None:
    for compression, rounding in ROUNDING.items():
        group = compressed_group(compression)
        for dtype in (torch.float32, torch.float64):
            for op in ("SUM", "AVG", "PREMUL_SUM"):
                for count in (1, 13, 30_001):
                    inputs = [make_input(r, count * world, dtype) for r in range(world)]
                    expected = reference(inputs, op).view(world, count)[rank]
                    own = inputs[rank].clone()
                    output = torch.empty(count, dtype=dtype)
                    dist.reduce_scatter_tensor(output, own, op=operator_of(op), group=group)
                    torch.testing.assert_close(output.double(), expected, rtol=rounding * world, atol=0)
                    assert torch.equal(own, inputs[rank]), "the input was changed"
                    from_list = torch.empty(count, dtype=dtype)
                    parts = [part.clone() for part in own.view(world, count)]
                    dist.reduce_scatter(from_list, parts, op=operator_of(op), group=group)
                    assert torch.equal(from_list, output)
                    in_place = own.view(world, count)
                    dist.reduce_scatter_tensor(in_place[rank], own, op=operator_of(op), group=group)
                    assert torch.equal(in_place[rank], output)


@pytest.mark.parametrize("world", [2, 3, 7])
def test_reduce_scatter_is_close_and_leaves_its_input(world: int) -> None:
    run_ranks(world, reduce_scatter_cases, timeout_s=120)


def not_contiguous_and_coalesced(rank: int, world: int) -> None:
    group = compressed_group("bf16")
    matrix = make_input(rank, 1200).reshape(30, 40)
    flat = matrix.clone()
    dist.all_reduce(flat, group=group)
    turned = matrix.t().contiguous().t()
    assert not turned.is_contiguous()
    dist.all_reduce(turned, group=group)
    assert torch.equal(turned, flat)
    several = [make_input(rank, count) for count in (5, 1, 3000)]
    total = torch.cat(several)
    dist.all_reduce(total, group=group)
    dist.all_reduce_coalesced(several, group=group)
    assert torch.equal(torch.cat(several), total)


def test_tensors_that_are_not_contiguous_and_several_at_once() -> None:
    run_ranks(3, not_contiguous_and_coalesced)


def beyond_the_range(rank: int, world: int) -> list[str]:
    fp16, bf16 = compressed_group("fp16"), compressed_group("bf16")
    sums = torch.tensor([40_000.0, -40_000.0, 1e30, 1.0, -1e-3])
    dist.all_reduce(sums, group=fp16)
    assert sums[:4].tolist() == [65504.0, -65504.0, 65504.0, world]
    # Contributions are divided before they are added: no partial sum leaves the range.
    mean = torch.full((1000,), 60_000.0)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=fp16)
    torch.testing.assert_close(mean, torch.full((1000,), 60_000.0), rtol=world * ROUNDING["fp16"], atol=0)
    # What is not finite stays so, and says on all ranks what one had.
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0] if rank == 1 else [1.0, 1.0, 1.0, 1.0])
    dist.all_reduce(special, group=fp16)
    assert special[0] == float("inf") and special[1] == float("-inf") and special[2].isnan() and special[3] == world
    # The largest float that bf16 would round to infinity.
    most = torch.tensor([torch.finfo(torch.float32).max if rank == 0 else 0.0])
    dist.all_reduce(most, group=bf16)
    assert most.item() == torch.finfo(torch.bfloat16).max
    double = torch.tensor([1e300 if rank == 0 else 0.0], dtype=torch.float64)
    dist.all_reduce(double, group=bf16)
    assert double.item() == torch.finfo(torch.bfloat16).max
    return [digest(t) for t in (sums, mean, special, most, double)]


def test_finite_sums_never_become_infinite(capfd: pytest.CaptureFixture[str]) -> None:
    digests = run_ranks(3, beyond_the_range)
    assert all(other == digests[0] for other in digests)
    assert "were beyond the range of fp16 and were clipped" in capfd.readouterr().err


def refused(rank: int, world: int) -> None:
    group = compressed_group("bf16")
    advice = "Use a group without compression for it, or set MCCL_COMPRESSION for the job"
    for tensor, op in (
        (torch.ones(10, dtype=torch.int64), "SUM"),
        (torch.ones(10, dtype=torch.bool), "SUM"),
        (torch.ones(10), "MAX"),
    ):
        before = tensor.clone()
        with pytest.raises(TypeError, match=rf"compression 'bf16'.*got {op} of .*{advice}"):
            dist.all_reduce(tensor, op=operator_of(op), group=group)
        assert torch.equal(tensor, before)
    with pytest.raises(TypeError, match=r"reduce_scatter: .*int32"):
        dist.reduce_scatter_tensor(torch.ones(1, dtype=torch.int32), torch.ones(world, dtype=torch.int32), group=group)
    with pytest.raises(TypeError, match="'topk', which can carry all-reduces only"):
        dist.reduce_scatter_tensor(torch.ones(1), torch.ones(world), group=compressed_group("topk"))
    small = torch.full((10,), 1.0 + 2.0**-10, dtype=torch.float16)  # bf16 would round it
    dist.all_reduce(small, op=dist.ReduceOp.MAX, group=group)
    assert torch.all(small == 1.0 + 2.0**-10)
    dist.all_reduce(torch.ones(3), group=group)  # the group is as good as before


def test_a_compressed_group_refuses_what_it_cannot_compress() -> None:
    run_ranks(2, refused)


def exact(rank: int, world: int) -> None:
    """With the job's compression: all but large floating-point sums."""
    count = 100_000
    small, large = make_input(rank, 1000), make_input(rank, count)
    expected = reference([make_input(r, 1000) for r in range(world)], "SUM")
    dist.all_reduce(small)
    torch.testing.assert_close(small.double(), expected, rtol=1e-6, atol=0)
    numbers = torch.full((count,), 2**40 + rank, dtype=torch.int64)
    dist.all_reduce(numbers)
    assert torch.all(numbers == world * 2**40 + sum(range(world)))
    most = large.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert torch.equal(most, torch.stack([make_input(r, count) for r in range(world)]).amax(0))
    from_first = large.clone()
    dist.broadcast(from_first, 0)
    assert torch.equal(from_first, make_input(0, count))
    gathered = torch.empty(world * count)
    dist.all_gather_into_tensor(gathered, large)
    assert torch.equal(gathered, torch.cat([make_input(r, count) for r in range(world)]))
    if rank == 0:
        dist.send(large, 1)
    elif rank == 1:
        received = torch.empty(count)
        dist.recv(received, 0)
        assert torch.equal(received, make_input(0, count))
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "pi": 3.141592653589793})
    assert objects == [{"rank": r, "pi": 3.141592653589793} for r in range(world)]
    dist.barrier()
    rounded = large.clone()
    dist.all_reduce(rounded)
    assert torch.equal(rounded, rounded.bfloat16().float())
    whole = large.clone()
    dist.all_reduce(whole, group=dist.new_group(backend="mccl", pg_options=mccl_core.Options(compression="none")))
    assert not torch.equal(whole, whole.bfloat16().float())


def test_a_jobs_compression_touches_large_floating_point_sums_only() -> None:
    run_ranks(3, exact, MCCL_COMPRESSION="bf16")


def other_options(rank: int, world: int) -> None:
    options = mccl_core.Options(compression="bf16" if rank == 1 else "topk", topk_ratio=0.5)
    text = r"rank 0 on .* compresses with topk \(ratio 0.5.*but rank 1 on .* with bf16 for all reductions; give all"
    with pytest.raises(dist.DistBackendError, match=text):
        dist.new_group(backend="mccl", pg_options=options)
    alike = dist.new_group(backend="mccl", pg_options=mccl_core.Options(compression="fp16"))
    dist.all_reduce(torch.ones(3), group=alike)


def test_ranks_that_disagree_all_get_an_error_that_names_both() -> None:
    run_ranks(3, other_options)


def wrong_options(rank: int, world: int) -> None:
    with pytest.raises(TypeError, match=r"pg_options: the backend 'mccl' takes mccl_core.Options, not dict"):
        dist.new_group(backend="mccl", pg_options={"compression": "bf16"})
    with pytest.raises(ValueError, match=r"compression\n.*'none', 'fp16', 'bf16' or 'topk'"):
        mccl_core.Options(compression="int8")
    with pytest.raises(ValueError, match="topk_ratio"):
        mccl_core.Options(topk_ratio=1.5)


def test_wrong_options_are_told() -> None:
    run_ranks(1, wrong_options)


def alone(rank: int, world: int) -> None:
    for compression in ("bf16", "topk"):
        tensor = make_input(0, 1000)
        dist.all_reduce(tensor, group=compressed_group(compression, topk_warmup=0))
        assert torch.equal(tensor, make_input(0, 1000))


def test_a_group_of_one_changes_nothing() -> None:
    run_ranks(1, alone)
