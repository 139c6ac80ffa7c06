"""The text that the model learns, as numbers: one token per character, and batches drawn from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardstep.cli.demo.make_text import make_text


@dataclass(frozen=True, slots=True)
class Corpus:
    characters: str  # the character that token i stands for is characters[i]
    tokens: Tensor  # the whole text, int64


def load_corpus() -> Corpus:
    """Make the demo's text and turn it into tokens; the result is the same on every rank."""
    text = make_text()
    characters = "".join(sorted(set(text)))
    token_of = {character: token for token, character in enumerate(characters)}
    return Corpus(characters, torch.tensor([token_of[character] for character in text]))


def draw_batches(corpus: Corpus, *, batch: int, block: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, the tokens that follow them), each (batch, block), the same sequence for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(block + 1)
    while True:
        starts = torch.randint(len(corpus.tokens) - block, (batch, 1), generator=generator)
        windows = corpus.tokens[starts + offsets]
        yield windows[:, :-1], windows[:, 1:]
