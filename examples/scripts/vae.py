"""A variational autoencoder with a loop of its own. `python vae.py` trains it on made pictures."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--epochs", type=int, default=20)
args = parser.parse_args()


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(drawn), mean, log_variance


def pictures(count: int) -> TensorDataset:
    places = torch.randint(64, (count, 1))
    return TensorDataset(((torch.arange(64) - places).abs() < 6).float())


train_loader = DataLoader(pictures(2048), batch_size=args.batch_size, shuffle=True)
val_loader = DataLoader(pictures(256), batch_size=args.batch_size)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
for _ in range(args.epochs):
    for (x,) in train_loader:
        pixels, mean, log_variance = model(x)
        reconstruction = F.binary_cross_entropy_with_logits(pixels, x, reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()
        loss = (reconstruction + divergence) / len(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
