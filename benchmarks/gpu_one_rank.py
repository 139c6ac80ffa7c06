"""The part of `gpu.py` that looks at step() alone, on parameters of the shapes of GPT-2 XL.

With one rank nothing is sent, and step() should cost what the plain optimizer's does; with two, what the host does for
as many buckets is seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from drop_in_worker import in_turn
from given_gradients import Listed, Shape
from gpu_contenders import OPTIONS, AdamW, Rank
from torch import Tensor

import shardstep

PLAIN, SHARDED = "AdamW", "shard"
BLOCK_STEPS = 5
WARM_UP_STEPS = 3


def gpt2_shapes(layers: int, width: int, vocab: int, context: int) -> Iterator[Shape]:
    """Of all parameters of a GPT-2; its output layer is its embedding."""
    yield from ((vocab, width), (context, width))
    for _ in range(layers):
        yield from ((width,), (width,))
        yield from ((width, 3 * width), (3 * width,), (width, width), (width,))
        yield from ((width,), (width,))
        yield from ((width, 4 * width), (4 * width,), (4 * width, width), (width,))
    yield from ((width,), (width,))


class Stepper:
    """A model that has gradients given to it, and its optimizer."""

    def __init__(self, name: str, rank: Rank, model: Listed, gradients: list[Tensor]) -> None:
        self.name, self._rank, self._model, self._gradients = name, rank, model, gradients
        self._optimizer = (
            AdamW(model.parameters(), **OPTIONS) if name == PLAIN else shardstep.shard(model, AdamW, **OPTIONS)
        )

    def backward(self) -> None:
        self._model(self._gradients).backward()

    def iterate(self) -> None:
        self.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def device_seconds(self) -> float:
        """Of one step() among several iterations that follow each other without a pause."""
        watches = [self._rank.device.stopwatch() for _ in range(BLOCK_STEPS)]
        self.iterate()
        for watch in watches:
            self.backward()
            watch.start()
            self._optimizer.step()
            watch.stop()
            self._optimizer.zero_grad()
        self._rank.device.synchronize()
        return sum(watch.seconds() for watch in watches) / BLOCK_STEPS

    def host_seconds(self, *, idle: bool) -> float:
        """Of one step(), which finds the device idle, or busy with the backward pass before it.

        The device has nothing left to do before that pass: a queue full of launches would stop the host.
        """
        self._rank.device.synchronize()
        self._rank.peers.barrier()
        self.backward()
        if idle:
            self._rank.device.synchronize()
            self._rank.peers.barrier()
        start = time.perf_counter()
        self._optimizer.step()
        seconds = time.perf_counter() - start
        self._optimizer.zero_grad()
        return seconds


def measure_given_gradients(rank: Rank, rounds: int) -> dict[str, Any]:
    """On one rank against the plain optimizer; on more, where every step crosses loopback, shard() alone and less."""
    shapes = list(gpt2_shapes(2, 16, 100, 8) if rank.toy else gpt2_shapes(48, 1600, 50_257, 1_024))
    gradients = [1e-3 * torch.randn(shape, device=rank.device.place) for shape in shapes]
    alone = rank.peers.count == 1
    names = (PLAIN, SHARDED) if alone else (SHARDED,)
    steppers = [Stepper(name, rank, Listed(shapes, rank.device.place), gradients) for name in names]
    seconds: dict[str, dict[str, list[float]]] = {name: {"device": [], "idle": [], "busy": []} for name in names}
    for stepper in steppers:
        for _ in range(WARM_UP_STEPS if alone else 1):
            stepper.iterate()
    for turn in range(rounds):
        for stepper in in_turn(steppers, turn):
            found = seconds[stepper.name]
            if alone:
                found["device"].append(stepper.device_seconds())
            found["idle"].append(stepper.host_seconds(idle=True))
            found["busy"].append(stepper.host_seconds(idle=False))
        latest = ", ".join(f"{name} {1e3 * found['idle'][-1]:.2f}" for name, found in seconds.items())
        rank.peers.say(f"round {turn + 1} of {rounds}: host {latest} ms")
    numel = sum(gradient.numel() for gradient in gradients)
    return {"tensors": len(shapes), "parameters": numel, "seconds": rank.peers.from_all(seconds)}
