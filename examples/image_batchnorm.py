"""Images with BatchNorm and mixed precision: bf16 autocast on CPUs, fp16 with a GradScaler on GPUs.

torchrun --standalone --nproc-per-node 2 examples/image_batchnorm.py [--smoke]

Running means are buffers: in every step all ranks take those of the first, as DDP does before a forward. For
statistics over all ranks, call nn.SyncBatchNorm.convert_sync_batchnorm(model) before `shard`, on GPUs.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import shardstep

CLASSES, BATCH = 4, 16


def make_model(width: int) -> nn.Module:
    def block(inside: int, outside: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]

    layers = [*block(3, width), *block(width, width), nn.MaxPool2d(2), *block(width, 2 * width)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, CLASSES))


def draw(random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise, and in each image a bright square in the corner that is its class."""
    labels = torch.randint(CLASSES, (BATCH,), generator=random)
    images = torch.randn(BATCH, 3, 16, 16, generator=random)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += label + 1
    return images, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that it runs")
    smoke = parser.parse_args().smoke
    steps, width = (6, 8) if smoke else (300, 32)

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = make_model(width).to(device, memory_format=torch.channels_last)
    opt = shardstep.shard(model, torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    dtype = torch.float16 if on_gpu else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=on_gpu)  # bf16 has fp32's range and needs none

    random = torch.Generator().manual_seed(dist.get_rank())  # every rank its own images
    for step in range(steps):
        images, labels = (tensor.to(device) for tensor in draw(random))
        with torch.autocast(device.type, dtype=dtype):
            logits = model(images)
            loss = nn.functional.cross_entropy(logits, labels)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        opt.clip_grad_norm_(1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        schedule.step()
        if dist.get_rank() == 0 and (step + 1) % max(1, steps // 6) == 0:
            right = (logits.argmax(1) == labels).float().mean().item()
            print(f"step {step + 1}: loss {loss.item():.3f}, {right:.0%} right")

    means = model[1].running_mean
    print(f"rank {dist.get_rank()}: mean of the first running means {means.mean().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
