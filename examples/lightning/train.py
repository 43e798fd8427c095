"""A LightningModule as one writes it: digits that a small convolutional network learns to tell apart. `python train.py` trains it."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self, width: int = 32, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(width * 64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("val_accuracy", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        weights = [p for p in self.parameters() if p.dim() > 1]
        biases = [p for p in self.parameters() if p.dim() == 1]
        groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.hparams["lr"], weight_decay=0.05)


class Digits(L.LightningDataModule):
    """Seven-segment digits, 16 x 16, moved about and hidden in noise."""

    def __init__(self, num_train: int = 4096, num_val: int = 512, batch_size: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.train = drawn(self.hparams["num_train"], seed=0)
        self.val = drawn(self.hparams["num_val"], seed=1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.hparams["batch_size"], shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=self.hparams["batch_size"])


# Which of the segments top, upper left, upper right, middle, lower left, lower right, bottom a digit lights.
SEGMENTS = (
    "1110111",
    "0010010",
    "1011101",
    "1011011",
    "0111010",
    "1101011",
    "1101111",
    "1010010",
    "1111111",
    "1111011",
)
BARS = ((0, 0, 1, 6), (0, 0, 6, 1), (0, 5, 6, 1), (5, 0, 1, 6), (5, 0, 6, 1), (5, 5, 6, 1), (10, 0, 1, 6))


def drawn(count: int, seed: int) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    images = torch.randn(count, 1, 16, 16, generator=generator)
    places = torch.randint(5, (count, 2), generator=generator)
    for image, label, (top, left) in zip(images, labels.tolist(), places.tolist(), strict=True):
        for bar in (bar for bar, lit in zip(BARS, SEGMENTS[label], strict=True) if lit == "1"):
            row, column, height, width = bar
            image[0, top + row : top + row + height, left + column : left + column + width] += 1.5
    return TensorDataset(images, labels)


def make() -> tuple[Classifier, Digits, L.Trainer]:  # batchscout
    return Classifier(), Digits(), L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False)  # batchscout


if __name__ == "__main__":
    L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False).fit(Classifier(), Digits())
