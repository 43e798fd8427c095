"""A residual network with BatchNorm, and pictures whose shape is to be told. It knows nothing of batchscout."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

SIZE, SHAPES = 16, 4


class Residual(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.way = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.way(x))


class ResNet(nn.Module):
    """Pictures (B, 1, 16, 16) to logits (B, 4). Its repeated blocks are in the Sequentials of its stages."""

    def __init__(self, width: int = 16, blocks_per_stage: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.stages = nn.Sequential(
            stage(width, width, 1, blocks_per_stage),
            stage(width, 2 * width, 2, blocks_per_stage),
            stage(2 * width, 4 * width, 2, blocks_per_stage),
        )
        self.head = nn.Linear(4 * width, SHAPES)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(image)).mean((2, 3)))


def stage(channels_in: int, channels: int, stride: int, num_blocks: int) -> nn.Sequential:
    first = Residual(channels_in, channels, stride)
    return nn.Sequential(first, *(Residual(channels, channels, 1) for _ in range(num_blocks - 1)))


class Pictures(Dataset[dict[str, Tensor]]):
    """Samples are dictionaries {image, labels}: a disc, a ring, a square or a cross, anywhere, in noise."""

    def __init__(self, count: int, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(SHAPES, (count,), generator=drawn)
        y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        at = torch.randint(5, SIZE - 5, (2, count, 1, 1), generator=drawn)
        dx, dy = (x - at[0]).abs(), (y - at[1]).abs()
        far = (dx.square() + dy.square()).float().sqrt()
        shapes = torch.stack([far < 4, (far < 5) & (far > 3), torch.maximum(dx, dy) < 4, torch.minimum(dx, dy) < 1])
        images = shapes[self.labels, torch.arange(count)].float()
        self.images = (images + 0.5 * torch.randn(images.shape, generator=drawn))[:, None]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "labels": self.labels[index]}


def data(num_train: int = 8192, num_val: int = 512) -> tuple[Pictures, Pictures]:
    return Pictures(num_train, seed=1), Pictures(num_val, seed=2)
