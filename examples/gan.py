"""A GAN with the fast lane: one module, two sharded optimizers, one checkpoint of both.

torchrun --standalone --nproc-per-node 2 examples/gan.py [--smoke]

The generator learns to draw points on a circle. Each optimizer has parameters of its own: the generator's loss goes
through the discriminator, whose gradients from it are not wanted and dropped.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn

import shardstep

SIZE, NOISE, BATCH = 64, 8, 64


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE), nn.ReLU())
        self.generator.append(nn.Linear(SIZE, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, SIZE), nn.LeakyReLU(0.2), nn.Linear(SIZE, SIZE))
        self.discriminator.extend([nn.LeakyReLU(0.2), nn.Linear(SIZE, 1)])


def real_points(generator: torch.Generator) -> torch.Tensor:
    angle = torch.rand(BATCH, generator=generator) * 2 * torch.pi
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def open_device() -> torch.device:
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def train(model: Gan, of_generator: torch.optim.Optimizer, of_discriminator: torch.optim.Optimizer, steps: int) -> None:
    score = nn.functional.binary_cross_entropy_with_logits
    device = next(model.parameters()).device
    random = torch.Generator().manual_seed(dist.get_rank())  # every rank its own points
    ones, zeros = torch.ones(BATCH, 1, device=device), torch.zeros(BATCH, 1, device=device)
    for step in range(steps):
        noise = torch.randn(BATCH, NOISE, generator=random).to(device)
        real = real_points(random).to(device)
        fake = model.generator(noise)
        loss_d = score(model.discriminator(real), ones) + score(model.discriminator(fake.detach()), zeros)
        loss_d.backward()
        of_discriminator.step()
        of_discriminator.zero_grad()

        loss_g = score(model.discriminator(fake), ones)
        loss_g.backward()
        of_generator.step()
        of_generator.zero_grad()
        of_discriminator.zero_grad()  # what the generator's loss has left there
        if dist.get_rank() == 0 and (step + 1) % max(1, steps // 5) == 0:
            radius = fake.norm(dim=1).mean().item()
            print(f"step {step + 1}: losses {loss_d.item():.3f} and {loss_g.item():.3f}, mean radius {radius:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that it runs")
    steps = 10 if parser.parse_args().smoke else 2000
    device = open_device()
    torch.manual_seed(0)
    model = Gan().to(device)
    of_generator = shardstep.shard(model, torch.optim.Adam, groups=[{"params": "generator.*"}], lr=1e-3)
    of_discriminator = shardstep.shard(model, torch.optim.Adam, groups=[{"params": "discriminator.*"}], lr=1e-3)
    train(model, of_generator, of_discriminator, steps)

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    shardstep.save(f"{folder[0]}/gan", model, [of_generator, of_discriminator], extra={"step": steps})
    extra = shardstep.load(f"{folder[0]}/gan", model, [of_generator, of_discriminator])
    held = sum(v.nbytes for opt in (of_generator, of_discriminator) for e in opt.state.values() for v in e.values())
    total = 2 * sum(param.nbytes for param in model.parameters())
    print(f"rank {dist.get_rank()} loaded step {extra['step']}; it holds {held:,} of {total:,} bytes of state")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
