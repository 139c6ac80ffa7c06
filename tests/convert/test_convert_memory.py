"""Conversions hold a block or a tensor at a time, never the model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from converting import same

pytestmark = pytest.mark.slow  # make test-slow

# What the system may drop (pages of files) does not count; what the process has for itself does.
PROGRAM = """
import json, sys, threading, time, warnings
from pathlib import Path
import pytest
import torch
from torch import nn, optim
import torch.distributed.checkpoint as dcp
import shardstep
from shardstep.convert.run import ConvertRequest, convert

warnings.simplefilter("ignore")
torch.set_num_threads(1)

def own_nbytes():
    row = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("RssAnon"))
    return int(row.split()[1]) * 1024

def peak_of(action):
    before, peak, is_done = own_nbytes(), [0], threading.Event()
    def watch():
        while not is_done.is_set():
            peak[0] = max(peak[0], own_nbytes())
            time.sleep(0.001)
    thread = threading.Thread(target=watch)
    thread.start()
    action()
    is_done.set()
    thread.join()
    return peak[0] - before

def make(folder):
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(20)))
    opt = optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    opt.step()
    shardstep.save(folder / "saved", model, opt)
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, folder / "plain.pt")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "stock", no_dist=True)

folder = Path(sys.argv[1])
if sys.argv[2] == "make":
    make(folder)
    sys.exit()
jobs = [("saved", "dcp"), ("saved", "torch"), ("saved", "safetensors"), ("plain.pt", "dcp"), ("stock", "torch"),
        ("saved-safetensors", "dcp")]
found = {}
for source, to in jobs:
    target = folder / f"{source}-{to}"
    wanted = ConvertRequest(folder / source, target, to, with_state=to == "safetensors")
    found[f"{source} to {to}"] = peak_of(lambda: convert(wanted))
print(json.dumps(found))
"""


def test_the_peak_of_every_conversion_is_a_few_tensors(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    subprocess.run([*command, "make"], check=True, timeout=100)
    run = subprocess.run([*command, "convert"], check=True, timeout=100, capture_output=True, text=True)
    found = json.loads(run.stdout)
    print(found)
    tensor = 1024 * 1024 * 4
    whole = 20 * 3 * tensor
    assert len(found) == 6
    for what, peak in found.items():
        assert peak < whole / 5, f"{what} took {peak / 2**20:.0f} MiB; all tensors are {whole / 2**20:.0f}"


def test_a_tensor_larger_than_a_block_is_read_and_written_in_blocks(tmp_path, monkeypatch):
    """With blocks of 1 kB: what is alive at once is counted, and the result is the same."""
    import torch
    from torch import nn

    import shardstep
    from converting import to
    from shardstep.state.blocks import blocks_of_whole

    model = nn.Linear(64, 64)
    monkeypatch.setattr("shardstep.state.blocks.MOST_NBYTES", 1024)
    shardstep.save(tmp_path / "saved", model)
    sizes = []
    monkeypatch.setattr(
        "shardstep.convert.to_dcp.blocks_of_whole",
        lambda block: sizes.append(block.nbytes) or blocks_of_whole(block),
    )
    to("dcp", tmp_path / "saved", tmp_path / "made")
    assert max(sizes) <= 1024
    to("torch", tmp_path / "made", tmp_path / "made.pt")
    same(dict(model.state_dict()), torch.load(tmp_path / "made.pt", weights_only=True)["model"])
