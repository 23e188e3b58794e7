"""Communication hooks for DistributedDataParallel that let the GPU wait for the gradients, and not the CPU.

DDP's own hook ends backward by waiting for a future, and on MPS a future cannot tell a stream to wait: the CPU blocks
until the last bucket is there, and only then encodes the optimizer. With a hook of this module backward ends by putting
waits on the stream instead: the optimizer's kernels are queued while buckets are still on the wire, and start when
they have come. On the CPU the results are the same and nothing is gained.

    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    model.register_comm_hook(None, mccl_core.ddp_hook)

The state is the process group, None for the default one. gradient_as_bucket_view saves a copy of the gradients.
"""

# No postponed annotations: DDP compares those of a hook with the types themselves.
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def ddp_hook(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients in place; does not block.

    Bit-identical with DDP's own hook. A rank that fails afterwards leaves NaN in the gradients, and the group's next
    collective raises.
    """
    group = _group(state)
    gradients = bucket.buffer().div_(group.size())
    _at_the_end_of_backward(dist.all_reduce(gradients, group=group, async_op=True).wait)
    return _completed(gradients)


def fp16_ddp_hook(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """`ddp_hook` with float16 on the wire, as torch's fp16_compress_hook."""
    return _compressed(torch.float16, state, bucket)


def bf16_ddp_hook(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """`ddp_hook` with bfloat16 on the wire, as torch's bf16_compress_hook."""
    return _compressed(torch.bfloat16, state, bucket)


_EQUIVALENTS: dict[Any, Hook] = {
    None: ddp_hook,
    default_hooks.allreduce_hook: ddp_hook,
    default_hooks.fp16_compress_hook: fp16_ddp_hook,
    default_hooks.bf16_compress_hook: bf16_ddp_hook,
    ddp_hook: ddp_hook,
    fp16_ddp_hook: fp16_ddp_hook,
    bf16_ddp_hook: bf16_ddp_hook,
}


def hook_for_mps(hook: Hook | None) -> Hook:
    """The hook to register for a model on MPS where the user asked for `hook`; None stands for DDP's own.

    Raises:
        ValueError: `hook` is not one that is known to work there; the text says why and what can be used.
    """
    try:
        return _EQUIVALENTS[hook]
    except (KeyError, TypeError):
        name = getattr(hook, "__name__", repr(hook))
        raise ValueError(
            f"the comm hook {name} cannot be used on MPS: a hook that goes on in Future.then() would encode on the GPU "
            "from a thread that must not, and before the gradients are there. Leave it out, or use allreduce_hook, "
            "fp16_compress_hook or bf16_compress_hook of torch, or a hook of mccl_core.ddp"
        ) from None


def _compressed(
    dtype: torch.dtype, state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    group = _group(state)
    gradients = bucket.buffer()
    compressed = gradients.to(dtype).div_(group.size())
    work = dist.all_reduce(compressed, group=group, async_op=True)

    def finish() -> None:
        work.wait()
        gradients.copy_(compressed)  # on the stream it stands behind the wait

    _at_the_end_of_backward(finish)
    return _completed(gradients)


def _completed(gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    # It names no device: an event of the stream is not needed behind the waits.
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradients)
    return future


def _group(state: dist.ProcessGroup | None) -> dist.ProcessGroup:
    return dist.group.WORLD if state is None else state


def _at_the_end_of_backward(function: Callable[[], Any]) -> None:
    # Callbacks run in the order in which they were queued, and DDP queues its own after the last bucket's hook: it
    # finds the gradients behind our waits.
    torch.autograd.Variable._execution_engine.queue_callback(function)
