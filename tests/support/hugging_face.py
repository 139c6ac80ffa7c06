"""What the tests of Accelerate and of the Trainer share: a worker of the pool as a process that torchrun started."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from repository import ROOT


@contextmanager
def launched() -> Iterator[None]:
    """Inside, the variables that torchrun sets; at the end the frameworks forget what they know of this process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    told |= {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "HF_HUB_OFFLINE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true"}  # the group is there already
    try:
        with mock.patch.dict(os.environ, told):
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def whole_state(optimizer: Any) -> dict[str, Any]:
    """By the names of parameters, on every rank; `optimizer` is any kind."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if hasattr(optimizer, "consolidate_state_dict"):
        for rank in range(dist.get_world_size()):
            optimizer.consolidate_state_dict(to=rank)
            if rank == dist.get_rank():
                state = optimizer.state_dict()["state"]
    else:
        state = optimizer.state_dict()["state"]
    return {str(place): {key: torch.as_tensor(value).clone() for key, value in state[place].items()} for place in state}


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any], *, atol: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, Mapping):
            assert_same(value, other[key], atol=atol)
        else:
            torch.testing.assert_close(value, other[key], rtol=0, atol=atol, msg=lambda text, key=key: f"{key}: {text}")


def errors_of(*actions: Callable[[], Any]) -> list[str]:
    found = []
    for action in actions:
        try:
            action()
            found.append("no error")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def torchrun(script: Path, *arguments: str, ranks: int, folder: Path, fails: bool = False) -> str:
    """What `script` prints, or what it says when it fails; started as people start it, in `folder`."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    told = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback, "HF_HUB_OFFLINE": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*launch, str(script), *arguments], cwd=folder, env={**os.environ, **told, **_path()},
                          capture_output=True, text=True, timeout=150, check=False)  # fmt: skip
    assert (done.returncode != 0) == fails, done.stderr[-6000:]
    return done.stderr if fails else done.stdout


def _path() -> dict[str, str]:
    """Where this process imports from, also where the folder is another."""
    given = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(os.path.abspath(part) for part in given.split(os.pathsep) if part)}


def documented(section: str, folder: Path) -> Path:
    """The program in that section of docs/integrations.md."""
    text = (ROOT / "docs" / "integrations.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(found) == 1
    script = folder / "script.py"
    script.write_text(found[0])
    return script
