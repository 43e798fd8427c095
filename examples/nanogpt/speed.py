"""What fits, and what is fast, for the model of train.py: `python speed.py`."""

from train import GPT, block_size, train_data, val_data

import batchscout

train, val = (list(zip(d[:-1].split(block_size)[:-1], d[1:].split(block_size)[:-1], strict=True)) for d in (train_data, val_data))  # fmt: skip
study = batchscout.find(model=GPT, loss="mean", train=train, val=val, memory_limit="256MiB", stages=[{"type": "frontier", "largest": 32}])  # fmt: skip
print(study)
