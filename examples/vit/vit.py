"""A vision transformer, and pictures of gratings whose direction is to be told. It knows nothing of batchscout."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SIZE, PATCH, DIRECTIONS = 16, 4, 8


class Layer(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, num_heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class ViT(nn.Module):
    """Pictures (B, 1, 16, 16) to logits (B, 8)."""

    def __init__(self, width: int = 64, num_layers: int = 4, num_heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.places = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, width))
        self.layers = nn.ModuleList(Layer(width, num_heads) for _ in range(num_layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, DIRECTIONS))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def data(num_train: int = 8192, num_val: int = 512) -> tuple[TensorDataset, TensorDataset]:
    """Samples are (image, label) tuples."""
    return gratings(num_train, seed=1), gratings(num_val, seed=2)


def gratings(count: int, seed: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.randint(DIRECTIONS, (count,), generator=drawn)
    phases, waves = torch.rand(2, count, 1, 1, generator=drawn).mul(2 * math.pi).unbind()
    angles = (math.pi / DIRECTIONS * labels)[:, None, None]
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    images = torch.sin((0.5 + waves / 12) * (x * angles.cos() + y * angles.sin()) + phases)
    return TensorDataset((images + 0.5 * torch.randn(images.shape, generator=drawn))[:, None], labels)
