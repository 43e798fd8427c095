"""Which batch and learning rate to train the model of train.py with: `python study.py`."""

from train import GPT, batch_size, block_size, gradient_accumulation_steps, learning_rate, train_data, val_data

import batchscout

train, val = (
    list(zip(d[:-1].split(block_size)[:-1], d[1:].split(block_size)[:-1], strict=True)) for d in (train_data, val_data)
)
study = batchscout.find(
    model=GPT, loss="mean", train=train, val=val, memory_limit="256MiB", sample_budget=4096,
    optimizer={"lr": learning_rate, "reference_batch_size": batch_size * gradient_accumulation_steps},
    stages=[{"type": "frontier", "largest": 32, "compile": [False]}, "throughput", "equivalence", "train"],
)  # fmt: skip
print(study)
