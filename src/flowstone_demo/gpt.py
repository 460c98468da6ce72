"""A GPT whose tokens are bytes, with dropout, and with tied input and output embeddings."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from flowstone_demo.sizes import Sizes

BYTES = 256


class Block(nn.Module):
    """Attention, then a feed-forward network, each with a residual connection."""

    def __init__(self, form: Sizes) -> None:
        super().__init__()
        width = form.width
        self.heads, self.dropout = form.heads, form.dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(form.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.proj(self.attend(self.norm1(x))))
        out: torch.Tensor = x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))
        return out

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return mixed.transpose(1, 2).reshape(batch, length, width)


class GPT(nn.Module):
    """The model: its input is bytes, and its output the logits of the next byte."""

    def __init__(self, form: Sizes) -> None:
        super().__init__()
        self.wte = nn.Embedding(BYTES, form.width)
        self.wpe = nn.Embedding(form.length, form.width)
        self.drop = nn.Dropout(form.dropout)
        self.blocks = nn.ModuleList(Block(form) for _ in range(form.depth))
        self.norm = nn.LayerNorm(form.width)
        self.head = nn.Linear(form.width, BYTES, bias=False)
        self.apply(_init)
        self.head.weight = self.wte.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`inputs`: int64 of shape (batch, length). Returns the logits, of shape (batch, length, 256)."""
        places = torch.arange(inputs.shape[1])
        x = self.drop(self.wte(inputs) + self.wpe(places))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _init(module: nn.Module) -> None:
    """Initialize as in GPT-2: normally distributed with standard deviation 0.02, and biases zero."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
