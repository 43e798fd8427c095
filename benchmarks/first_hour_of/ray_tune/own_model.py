from pathlib import Path
from typing import Any

import torch
import toy
from net import Net
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch import nn
from torch.utils.data import DataLoader


def train(config: dict[str, Any]) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    train_set, val_set = toy.make()
    loader = DataLoader(train_set, batch_size=config["batch_size"], shuffle=True)
    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            x, y = next(iter(DataLoader(val_set, batch_size=512)))
            tune.report({"loss": nn.functional.cross_entropy(model(x), y).item()})


tuner = tune.Tuner(
    train,
    param_space={"batch_size": tune.choice([4, 8, 16, 32, 64, 128]), "lr": tune.loguniform(1e-4, 1e-2)},
    tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=10, scheduler=ASHAScheduler()),
    run_config=tune.RunConfig(name="own", storage_path=str(Path.cwd() / "results")),
)
results = tuner.fit()
print("answer:", results.get_best_result().config)
