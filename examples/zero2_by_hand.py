"""ZeRO-2 by hand: data-parallel training with one copy of the optimizer's state, in plain torch.

torchrun --standalone --nproc-per-node 2 examples/zero2_by_hand.py

DistributedDataParallel (DDP) keeps the weights, the gradients and the optimizer's state on every rank. ZeRO-2 keeps the
weights on every rank, and cuts the gradients and the state into shards, one for each rank:

    backward   gradients of a bucket  -- reduce-scatter -->  the mean for this rank's shard; the rest is freed
    step       this rank's shard of the weights is stepped, with its gradients and its state, by a torch optimizer
    after it   this rank's shard of the weights  -- all-gather -->  the whole weights, for the next forward

That sends as many bytes as DDP, whose all-reduce is a reduce-scatter followed by an all-gather. `shardstep.shard` works
in the same way; docs/concepts.md says part by part what it adds to this file, and why.
"""

from __future__ import annotations

import math
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

BUCKET_NUMEL = 20_000  # for the small model below; millions for a real one, because networks like large messages
ALIGNMENT = 16  # elements: every parameter begins at a multiple of 64 bytes (in fp32), as in memory of its own

# Gloo's reduce-scatter is an all-reduce inside: the sums are right, but it sends twice the bytes. NCCL's is a real one.
# torch 2.13 gave both functions new names and warns about the old ones; torch 2.11 has only the old ones.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Bucket:
    """Parameters that travel together. Their weights lie one behind the other in one flat tensor."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.ranges: dict[nn.Parameter, slice] = {}  # where each parameter lies in the flat tensor
        end = 0
        for param in params:
            self.ranges[param] = slice(end, end + param.numel())
            end += math.ceil(param.numel() / ALIGNMENT) * ALIGNMENT
        # Padding at the end makes all shards the same size, as the collectives require.
        granule = dist.get_world_size() * ALIGNMENT
        self.weights = params[0].new_zeros(math.ceil(end / granule) * granule)
        for param, place in self.ranges.items():
            self.weights[place] = param.detach().flatten()
            param.data = self.weights[place].view_as(param)  # from here on the model reads the flat tensor
        # The shard is a view too: stepping it changes the flat tensor. It may begin in the middle of a parameter.
        self.shard = nn.Parameter(self.weights.chunk(dist.get_world_size())[dist.get_rank()])
        self.num_missing = len(params)  # gradients that this backward pass has not produced yet

    def start_reduce(self) -> None:
        """Start to sum the gradients over all ranks; this rank receives the part of the sum for its shard."""
        self.gradients = torch.zeros_like(self.weights)
        for param, place in self.ranges.items():
            if param.grad is not None:
                # Divided before the sum, as in DDP: the sum over the ranks is then the mean.
                torch.div(param.grad.flatten(), dist.get_world_size(), out=self.gradients[place])
                param.grad = None
        self.shard.grad = torch.empty_like(self.shard)
        self.work = reduce_scatter(self.shard.grad, self.gradients, async_op=True)

    def finish_reduce(self) -> None:
        """Wait for the sum, then free the gradients of all shards but this rank's, which ZeRO-1 would keep."""
        self.work.wait()
        del self.work, self.gradients


class Zero2:
    """Trains `model` as DDP and `optimizer_class` would.

    The class must treat every element alone, as AdamW does, because a shard may be cut anywhere. All parameters have
    one dtype and one device, and there is one backward pass for each step.
    """

    def __init__(self, model: nn.Module, optimizer_class: type[torch.optim.Optimizer], **options: Any) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0)  # all ranks begin with the values of rank 0
        # Backward produces the gradients of the last layers first, so those travel first.
        groups: list[list[nn.Parameter]] = [[]]
        for param in reversed([param for param in model.parameters() if param.requires_grad]):
            if groups[-1] and sum(other.numel() for other in groups[-1]) + param.numel() > BUCKET_NUMEL:
                groups.append([])
            groups[-1].append(param)
        self.buckets = [Bucket(params) for params in groups]
        self.num_started = 0  # how many buckets have started their reduce-scatter in this backward pass
        for bucket in self.buckets:
            for param in bucket.ranges:
                param.register_post_accumulate_grad_hook(partial(self.on_gradient, bucket))
        # An ordinary optimizer that knows only this rank's shards, so its state is 1/N of the whole.
        self.optimizer = optimizer_class([bucket.shard for bucket in self.buckets], **options)

    def on_gradient(self, bucket: Bucket, param: nn.Parameter) -> None:
        """Autograd calls this hook as soon as `param.grad` is complete, in the middle of the backward pass."""
        if bucket.num_missing == 0:
            raise RuntimeError("There was a second backward pass before step(); this example supports only one.")
        bucket.num_missing -= 1
        # Ranks may produce gradients in different orders, but collectives that ranks issue in different orders hang. So
        # a full bucket starts only after all buckets before it.
        while self.num_started < len(self.buckets) and self.buckets[self.num_started].num_missing == 0:
            self.start_next_reduce()

    def start_next_reduce(self) -> None:
        if self.num_started > 0:  # at most one bucket of flat gradients is in memory and in flight at a time
            self.buckets[self.num_started - 1].finish_reduce()
        self.buckets[self.num_started].start_reduce()
        self.num_started += 1

    def step(self) -> None:
        """Step this rank's shards, then collect the shards of all ranks."""
        while self.num_started < len(self.buckets):  # some parameter has no gradient on this rank: it counts as zero
            self.start_next_reduce()
        self.buckets[-1].finish_reduce()
        self.optimizer.step()
        self.optimizer.zero_grad()  # frees the gradients of the shards
        gathers = [all_gather(bucket.weights, bucket.shard.detach(), async_op=True) for bucket in self.buckets]
        for bucket, gather in zip(self.buckets, gathers, strict=True):
            gather.wait()
            bucket.num_missing = len(bucket.ranges)
        self.num_started = 0


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    zero = Zero2(model, torch.optim.AdamW, lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())  # every rank its own batches
    for step in range(20):
        x = torch.randn(64, 32, generator=generator).to(device)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        zero.step()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    held = sum(value.nbytes for state in zero.optimizer.state.values() for value in state.values())
    whole = 2 * sum(param.nbytes for param in model.parameters())
    print(f"rank {dist.get_rank()} holds {held:,} bytes of optimizer state; the whole is {whole:,}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
