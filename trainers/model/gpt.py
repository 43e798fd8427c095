"""A small GPT: pre-norm blocks, learned positions, tied head. It returns summed losses, as the contract asks.

Shapes: B micro-batch, T sequence, H heads, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchscout.trainers.config import CrossEntropy
from batchscout.trainers.model.cross_entropy import chunked_cross_entropy, summed_cross_entropy

INITIAL_STD = 0.02


class Attention(nn.Module):
    def __init__(self, hidden_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(hidden_dim, 3 * hidden_dim, bias=False)
        self.out = nn.Linear(hidden_dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        heads = self.qkv(x).view(batch, seq, 3, self.num_heads, dim // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, D/H)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))


class Block(nn.Module):
    def __init__(self, hidden_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_dim)
        self.attention = Attention(hidden_dim, num_heads, dropout)
        self.mlp_norm = nn.LayerNorm(hidden_dim)
        self.up = nn.Linear(hidden_dim, 4 * hidden_dim, bias=False)
        self.down = nn.Linear(4 * hidden_dim, hidden_dim, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    """module({"input_ids": (B, T), "targets": (B, T)}) -> (loss_sum, num_targets); targets of -100 do not count."""

    def __init__(
        self,
        *,
        vocab_size: int,
        seq_len: int,
        num_layers: int = 4,
        num_heads: int = 4,
        hidden_dim: int = 128,
        dropout: float = 0.0,
        cross_entropy: CrossEntropy = "whole",
        label_smoothing: float = 0.0,
    ) -> None:
        """cross_entropy: from logits held `whole`, or `chunked`, a sixteenth of them at a time. label_smoothing: the share
        of each target that is spread over all tokens, in training alone."""
        super().__init__()
        if hidden_dim % num_heads:
            raise ValueError(
                f"hidden_dim ({hidden_dim}) is not a multiple of num_heads ({num_heads}); "
                f"choose a multiple of {num_heads}"
            )
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing is {label_smoothing:g}; choose a share from 0 to below 1")
        if cross_entropy not in get_args(CrossEntropy):
            raise ValueError(f"cross_entropy is '{cross_entropy}'; choose {' or '.join(get_args(CrossEntropy))}")
        self.cross_entropy = cross_entropy
        self.label_smoothing = label_smoothing
        self.token_embedding = nn.Embedding(vocab_size, hidden_dim)
        self.position_embedding = nn.Embedding(seq_len, hidden_dim)
        self.blocks = nn.ModuleList(Block(hidden_dim, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_dim)
        self.head = nn.Linear(hidden_dim, vocab_size, bias=False)
        self.head.weight = self.token_embedding.weight
        self._initialise(num_layers)

    def _initialise(self, num_layers: int) -> None:
        """GPT-2's: residual outputs are scaled down by the number of residual additions (Radford et al. 2019)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=INITIAL_STD / ((2 * num_layers) ** 0.5 if residual else 1))

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        input_ids, targets = batch["input_ids"], batch["targets"]
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.token_embedding(input_ids) + self.position_embedding(positions)  # (B, T, D)
        for block in self.blocks:
            x = block(x)
        x, smoothing = self.norm(x), self.label_smoothing if self.training else 0.0
        if self.cross_entropy == "chunked":
            return chunked_cross_entropy(x, self.head.weight, targets, smoothing)
        return summed_cross_entropy(self.head(x), targets, smoothing)
