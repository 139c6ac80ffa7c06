"""A small GPT: pre-norm blocks, learned positions, the embedding also serves as the output layer, no dropout.

No dropout because the demo and the benchmarks compare two optimizers on the same numbers: given its weights and its
input, this model has only one answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class GPTConfig:
    vocab: int
    block: int  # the longest sequence, in tokens
    layers: int
    heads: int
    width: int

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of heads {self.heads}; every head gets width / heads"
            )


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        by_head = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = by_head.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


class FeedForward(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width, bias=False)
        self.project = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.project(gelu(self.expand(x)))
        return projected


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_feed_forward = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        deeper: Tensor = x + self.feed_forward(self.norm_feed_forward(x))
        return deeper


class GPT(nn.Module):
    """Tokens of shape (batch, length) in, logits of shape (batch, length, vocab) out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.block, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self._initialise()

    def _initialise(self) -> None:
        """GPT-2's: what is added to the residual stream shrinks with depth, so that the stream keeps its size."""
        residual_std = 0.02 / (2 * self.config.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=residual_std if name.endswith("project.weight") else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return linear(self.norm(x), self.tokens.weight)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of the token that follows each position."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())
