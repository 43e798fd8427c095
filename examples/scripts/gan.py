"""A GAN: two networks that train against each other. `python gan.py` trains it on made numbers."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.randn(2048, 2) + 3), batch_size=32, shuffle=True)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
for (real,) in loader:
    made = generator(torch.randn(len(real), 4))
    loss = F.softplus(-critic(real)).mean() + F.softplus(critic(made.detach())).mean()
    of_critic.zero_grad()
    loss.backward()
    of_critic.step()
    of_generator.zero_grad()
    F.softplus(-critic(made)).mean().backward()
    of_generator.step()
