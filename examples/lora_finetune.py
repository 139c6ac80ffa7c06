"""Fine-tune a causal language model of `transformers` with LoRA: only the adapters are trained, sharded and saved.

torchrun --standalone --nproc-per-node 2 examples/lora_finetune.py --model gpt2 --text book.txt --folder run
torchrun --standalone --nproc-per-node 2 examples/lora_finetune.py --smoke

Started again with the same folder it goes on from the newest checkpoint there, on any number of ranks.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

import shardstep


class Adapter(nn.Module):
    """What LoRA adds to the output of one layer: up(down(x)), which is zero in the beginning."""

    def __init__(self, width_in: int, width_out: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width_in, rank, bias=False), nn.Linear(rank, width_out, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        """As a forward hook of the layer, which stays as it is."""
        added = self.up(self.down(inputs[0].to(self.down.weight.dtype)))
        return output + added.to(output.dtype)


def add_adapters(model: nn.Module, rank: int) -> nn.ModuleList:
    """One for every linear layer but the last, which makes words of it. The model itself is frozen."""
    model.requires_grad_(False)
    adapters = nn.ModuleList()
    for layer in model.modules():
        if not isinstance(layer, nn.Linear | Conv1D) or layer is model.get_output_embeddings():
            continue
        turned = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T  # GPT-2's layers lie the other way
        adapter = Adapter(turned.shape[1], turned.shape[0], rank).to(layer.weight.device)
        layer.register_forward_hook(adapter)
        adapters.append(adapter)
    return adapters


def load_model(options: argparse.Namespace) -> tuple[nn.Module, torch.Tensor]:
    """The model, and a text in its tokens."""
    if options.smoke:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        torch.manual_seed(0)  # the frozen part must be the same on every rank: shard() sees to the adapters only
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes))
        return model, torch.tensor(list(Path(__file__).read_bytes()))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    return model, tokenizer(options.text.read_text(), return_tensors="pt").input_ids[0]


def draw(tokens: torch.Tensor, step: int, options: argparse.Namespace) -> torch.Tensor:
    """The batch of this step and rank: the same again when the program is started again."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(tokens) - options.length, (options.batch,), generator=generator)
    return torch.stack([tokens[start : start + options.length] for start in starts])


def read_options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2", help="a name or a folder for from_pretrained")
    parser.add_argument("--text", type=Path, help="what to train on")
    parser.add_argument("--folder", type=Path, default=Path("lora-run"), help="where checkpoints are")
    parser.add_argument("--rank", type=int, default=8, help="of the matrices that are added")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--batch", type=int, default=4, help="on each rank")
    parser.add_argument("--length", type=int, default=128, help="in tokens")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--smoke", action="store_true", help="a tiny random model and this file as text: seconds")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.save_every, options.length = 12, 6, 32
    elif options.text is None:
        parser.error("--text is needed (or --smoke)")
    return options


def main() -> None:
    options = read_options()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    model, tokens = load_model(options)
    model.to(device)
    adapters = add_adapters(model, options.rank)

    opt = shardstep.shard(adapters, torch.optim.AdamW, lr=options.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, options.steps)
    begin = 0
    if options.folder.is_dir() and any(options.folder.iterdir()):
        extra = shardstep.load(options.folder, adapters, opt)
        begin = extra["step"]
        schedule.load_state_dict(extra["schedule"])
    if dist.get_rank() == 0:
        trained, frozen = (sum(p.numel() for p in part.parameters()) for part in (adapters, model))
        print(f"begin at step {begin}: {trained:,} elements are trained, {frozen:,} are not", flush=True)

    for step in range(begin, options.steps):
        batch = draw(tokens, step, options).to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        opt.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
        schedule.step()
        if (step + 1) % options.save_every == 0:
            extra = {"step": step + 1, "schedule": schedule.state_dict()}
            shardstep.save(options.folder / f"step-{step + 1}", adapters, opt, extra=extra, keep=2)
            if dist.get_rank() == 0:
                size = sum(adapter.up.weight.double().norm().item() for adapter in adapters)
                print(f"step {step + 1}: loss {loss.item():.6f}, adapters {size:.12f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
