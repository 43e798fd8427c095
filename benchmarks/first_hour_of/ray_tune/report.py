from pathlib import Path
from typing import Any

import sets
import torch
from net import Net
from ray import tune
from torch import nn
from torch.utils.data import DataLoader


def train(config: dict[str, Any]) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    train_set, val_set = sets.make()
    loader = DataLoader(train_set, batch_size=config["batch_size"], shuffle=True)
    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            x, y = next(iter(DataLoader(val_set, batch_size=512)))
            tune.report({"loss": nn.functional.cross_entropy(model(x), y).item()})


tuner = tune.Tuner.restore(str(Path.cwd() / "results" / "own-data"), trainable=train, resume_unfinished=True)
results = tuner.fit()
print("answer:", results.get_best_result().config)
results.get_dataframe().to_csv("trials.csv")
