"""What `gpu.py` compares: the device, two models, and six ways to train them on several ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from meters import resident_bytes, start_of_peak
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel

import shardstep

SEED = 20
BATCHES = 4
# Some gradients are zero but for rounding (an attention's key bias): with torch's eps of 1e-8 AdamW would make whole
# steps of that noise, and contenders that add in another order would part.
OPTIONS: dict[str, Any] = {"lr": 3e-4, "eps": 1e-6, "fused": True}
AdamW = torch.optim.AdamW


# -- the device --------------------------------------------------------------------------------------------------------


class Stopwatch(Protocol):
    """Time between two places in the device's work, read when that work is done."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def seconds(self) -> float: ...


class Device(Protocol):
    """All that a rank asks of its device beside tensors."""

    place: torch.device
    backend: str
    tells_waits: bool  # whether there is anything to wait for in `waits_are`

    def synchronize(self) -> None: ...
    def stopwatch(self) -> Stopwatch: ...
    def reset_peak(self) -> None: ...
    def peak(self) -> int:
        """Bytes allocated at most since `reset_peak`."""

    def reserved(self) -> int:
        """Bytes that the allocator has from the driver."""

    def waits_are(self, mode: str) -> AbstractContextManager[None]:
        """Inside, a host that waits for the device is warned ("warn") or stopped ("error")."""

    def facts(self) -> dict[str, str]: ...


class EventStopwatch:
    def __init__(self) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def start(self) -> None:
        self._events[0].record()

    def stop(self) -> None:
        self._events[1].record()

    def seconds(self) -> float:
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


class HostStopwatch:
    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._stopped = time.perf_counter()

    def seconds(self) -> float:
        return self._stopped - self._started


class Cuda:
    """The one GPU that all ranks share."""

    backend = "nccl"
    tells_waits = True

    def __init__(self) -> None:
        self.place = torch.device("cuda", 0)
        torch.cuda.set_device(self.place)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def stopwatch(self) -> Stopwatch:
        return EventStopwatch()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def reserved(self) -> int:
        return torch.cuda.memory_reserved()

    @contextmanager
    def waits_are(self, mode: str) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode itself is a prototype
            torch.cuda.set_sync_debug_mode(mode)
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def facts(self) -> dict[str, str]:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        return {
            "gpu": torch.cuda.get_device_name(),
            "driver": driver or "unknown",
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }


class Host:
    """Stands in for a GPU, so that the benchmark's own logic can be tried without one; its numbers mean nothing."""

    backend = "gloo"
    tells_waits = False

    def __init__(self) -> None:
        self.place = torch.device("cpu")

    def synchronize(self) -> None:
        """What ran on the host is done."""

    def stopwatch(self) -> Stopwatch:
        return HostStopwatch()

    def reset_peak(self) -> None:
        start_of_peak()

    def peak(self) -> int:
        return resident_bytes(peak=True)

    def reserved(self) -> int:
        return resident_bytes()

    def waits_are(self, mode: str) -> AbstractContextManager[None]:
        return nullcontext()

    def facts(self) -> dict[str, str]:
        return {"gpu": "none: on the host"}


DEVICES: dict[str, Callable[[], Device]] = {"cuda": Cuda, "cpu": Host}


# -- the other ranks ---------------------------------------------------------------------------------------------------


class Peers:
    """The other ranks, reached from host to host: a barrier on the device would be part of what is measured."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo")

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def from_all(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._group)
        return values

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"  {text}", file=sys.stderr, flush=True)

    def refuse(self, difference: str | None, meaning: str) -> None:
        """Stop on every rank if any found a difference: a faster wrong answer is no result."""
        found = [f"rank {rank}: {text}" for rank, text in enumerate(self.from_all(difference)) if text]
        if found:
            raise RuntimeError(f"{meaning}: {'; '.join(found)}")


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a launch."""

    device: Device
    peers: Peers
    toy: bool

    def save(self, result: dict[str, Any], out: Path) -> None:
        if self.peers.rank == 0:
            out.write_text(json.dumps(result | {"ranks": self.peers.count, "device": self.device.facts()}))


# -- the models --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """A model, and the shape of a rank's batch: of what goes in and of what should come out."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def model(self, device: torch.device) -> nn.Module:
        torch.manual_seed(SEED)
        return self.build().to(device)

    def batches(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """On the device beforehand: copying them there would be part of the time."""
        generator = torch.Generator().manual_seed(SEED + 1 + dist.get_rank())
        both = torch.randn((BATCHES, 2, *self.shape), generator=generator).to(device)
        return [(given, wanted) for given, wanted in both]


def linears(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(12)))


def encoder(layers: int, width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


LINEARS = Task("12 x Linear(2048)", partial(linears, 2048), (64, 2048))
ENCODER = Task("encoder, 12 layers", partial(encoder, 12, 512), (8, 128, 512))
TOY_LINEARS = Task("12 x Linear(64)", partial(linears, 64), (8, 64))
TOY_ENCODER = Task("encoder, 2 layers", partial(encoder, 2, 32), (2, 8, 32))


def layers_of(model: nn.Module) -> list[nn.Module]:
    return list(model.layers if isinstance(model, nn.TransformerEncoder) else model.children())


# -- the contenders ----------------------------------------------------------------------------------------------------


class Contender:
    """A model with its optimizer; `whole` is the model under DDP or as it is."""

    optimizer: Any

    def __init__(self, name: str, task: Task, device: Device) -> None:
        self.name = name
        self.whole = task.model(device.place)
        self._batches = cycle(task.batches(device.place))

    def loss(self) -> Tensor:
        given, wanted = next(self._batches)
        return nn.functional.mse_loss(self.whole(given), wanted)

    def iterate(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.whole.parameters(), 1.0)

    def iterate_with_clipping(self) -> None:
        self.loss().backward()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> None:
        """Leave nothing under way between ranks."""

    def params(self) -> list[Tensor]:
        return [param.detach() for param in self.whole.parameters()]

    def state_nbytes(self) -> int:
        """Of the optimizer's state on this rank, as the optimizer holds it."""
        states = self.optimizer.state.values()
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


class UnderDdp(Contender):
    """DDP with the plain optimizer or a ZeroRedundancyOptimizer."""

    def __init__(self, name: str, task: Task, device: Device, *, zero: Any = None, views: bool = False) -> None:
        super().__init__(name, task, device)
        self.whole = DistributedDataParallel(self.whole, gradient_as_bucket_view=views)
        params = self.whole.parameters()
        self.optimizer = (
            AdamW(params, **OPTIONS) if zero is None else zero(params, AdamW, parameters_as_bucket_view=True, **OPTIONS)
        )


class Sharded(Contender):
    """shardstep.shard, in a process group of its own: as in a program that has no other sharded optimizer.

    Of several in one group none knows that they are never in one backward pass, and each keeps more in memory.
    """

    def __init__(self, name: str, task: Task, device: Device, **config: Any) -> None:
        super().__init__(name, task, device)
        self.optimizer = shardstep.shard(
            self.whole, AdamW, process_group=dist.new_group(), config=shardstep.ShardConfig(**config), **OPTIONS
        )

    def clip(self) -> None:
        self.optimizer.clip_grad_norm_(1.0)

    def finish(self) -> None:
        self.optimizer.synchronize()

    def params(self) -> list[Tensor]:
        self.finish()
        return super().params()


class Fsdp2(Contender):
    """torch's fully_shard, layer by layer, with weights kept whole between forward and backward."""

    def __init__(self, name: str, task: Task, device: Device) -> None:
        super().__init__(name, task, device)
        for layer in layers_of(self.whole):
            fully_shard(layer, reshard_after_forward=False)
        fully_shard(self.whole, reshard_after_forward=False)
        self.optimizer = AdamW(self.whole.parameters(), **OPTIONS)


DDP, TORCH, DROP_IN = "DDP", "torch ZeRO", "drop-in"
WAIT, OVERLAP, ORDERED, FSDP2 = "shard, wait", "shard, overlap", "shard, ordered sums", "FSDP2"
IN_BACKWARD = "shard, step in backward"
OWN_ZERO = shardstep.ZeroRedundancyOptimizer
CONTENDERS: dict[str, Callable[[str, Task, Device], Contender]] = {
    DDP: UnderDdp,
    TORCH: partial(UnderDdp, zero=TorchZero),
    DROP_IN: partial(UnderDdp, zero=OWN_ZERO),
    WAIT: partial(Sharded, gather="wait"),
    OVERLAP: partial(Sharded, gather="overlap"),
    ORDERED: partial(Sharded, gather="wait", ordered_sums=True),
    FSDP2: Fsdp2,
}
# With one copy of the gradients, as the bound of memory supposes; shard and FSDP2 have no second one.
WEIGHED: dict[str, Callable[[str, Task, Device], Contender]] = {
    DDP: partial(UnderDdp, views=True),
    TORCH: partial(UnderDdp, zero=TorchZero, views=True),
    DROP_IN: partial(UnderDdp, zero=OWN_ZERO, views=True),
    WAIT: CONTENDERS[WAIT],
    IN_BACKWARD: partial(Sharded, gather="wait", step="backward"),
    FSDP2: Fsdp2,
}
AGREEING = (DDP, TORCH, DROP_IN, WAIT, OVERLAP, ORDERED)  # FSDP2 holds no whole parameters to compare
