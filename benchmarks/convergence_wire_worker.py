"""One rank of `convergence_wire.py`, started by torch.distributed.run: trains the demo's GPT, seed after seed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from convergence_worker import MODELS, Way, make_model, train
from rounds import leave

from shardstep.cli.demo.corpus import load_corpus

EXACT, WIRE, EXACT_GRADIENTS = "fp32", 'wire="bf16"', 'wire="bf16", reduce_dtype=torch.float32'
WAYS: Mapping[str, Way] = {
    EXACT: Way(),
    WIRE: Way(wire="bf16"),
    EXACT_GRADIENTS: Way(wire="bf16", reduce_dtype=torch.float32),
}
APART = 100  # between two seeds: each rank draws its batches by a seed of its own


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seeds", type=int, required=True, help="how many")
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes its JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    corpus, size = load_corpus(), MODELS[arguments.model]
    runs: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    for number in range(arguments.seeds):
        for name, way in WAYS.items():
            losses = train(f"seed {number}, {name}", way, corpus, size, arguments.steps, seed=(number + 1) * APART)
            runs[name].append([round(loss, 5) for loss in losses])
    numel = sum(parameter.numel() for parameter in make_model(corpus, size).parameters())
    if dist.get_rank() == 0:
        result = {"ranks": dist.get_world_size(), "size": asdict(size), "parameters": numel, "losses": runs}
        arguments.out.write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
