"""A model and a data set of your own, as batchscout wants them. Run from this directory: batchscout run own_model.yaml"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SequenceSum(torch.utils.data.Dataset):
    """Map-style: `samples[i]` is what torch's default collation can batch."""

    def __init__(self, num_samples: int, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.digits = torch.randint(0, 10, (num_samples, length), generator=generator)

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        digits = self.digits[index]
        return {"digits": digits, "running_sum": digits.cumsum(0) % 10}


def data(*, num_samples: int = 4096, length: int = 32) -> tuple[SequenceSum, SequenceSum]:
    """(train, val)"""
    return SequenceSum(num_samples, length, seed=0), SequenceSum(256, length, seed=1)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x))[0]


class RunningSum(nn.Module):
    """The contract: module(batch) -> (loss_sum, num_targets), two scalar tensors. Sums, never means."""

    def __init__(self, *, width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 10)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        x = self.embedding(batch["digits"])
        for layer in self.layers:
            x = layer(x)
        targets = batch["running_sum"].flatten()
        loss_sum = F.cross_entropy(self.head(x).flatten(0, 1), targets, reduction="sum")
        return loss_sum, torch.tensor(targets.numel(), device=targets.device)
