"""GPT-2 (Radford et al., 2019), without dropout; input and output embeddings are tied."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from bench.training.records import Shape


class Block(nn.Module):
    """Attention, then a feed-forward network, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.projection(self.attend(self.norm_1(x)))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = self.attention(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, width)


class GPT(nn.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(_init)
        self.head.weight = self.tokens.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs: int64 of shape (batch, length); returns logits of shape (batch, length, vocabulary)."""
        x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _init(module: nn.Module) -> None:
    """GPT-2's: normal with deviation 0.02, no bias."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
