"""A small script, and what is taken of it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from batchscout.trainers.sources.adapted import loaders_of, module_of, settings_of
from batchscout.trainers.sources.watch import script
from batchscout.trainers.sources.watch.loop import Loop

HEAD = """
import argparse, torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
X, Y = torch.randn(60, 8), torch.randint(0, 3, (60,))
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))
train_loader = DataLoader(TensorDataset(X, Y), batch_size=6, shuffle=True)
val_loader = DataLoader(TensorDataset(X[:20], Y[:20]), batch_size=10)
"""
PLAIN = """
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for epoch in range(5):
    for x, y in train_loader:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
"""


def watched(folder: Path, text: str, *args: str, head: str = HEAD) -> Any:
    (folder / "train.py").write_text(head + textwrap.dedent(text))
    script.watched.cache_clear()
    return script.made(script="train.py", args=args)


def sets_of(loop: Loop) -> tuple[Any, Any]:
    found = loaders_of(loop)
    assert found is not None
    return found


def model_of(loop: Loop) -> Any:
    found = module_of(loop)
    assert found is not None
    return found


def keys_of(loop: Loop) -> dict[str, Any]:
    said = settings_of(loop, None)
    return {**said.keys, "run_samples": said.run_samples}
