"""A causal language model from its configuration, trained by the Trainer of transformers: `python train.py` trains it."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

block_size = 64


def group_texts(files: list[Path]) -> Dataset:
    """The bytes of the files, in blocks of one length."""
    ids = list(chain.from_iterable(file.read_bytes() for file in files))
    blocks = [ids[i : i + block_size] for i in range(0, len(ids) - block_size, block_size)]
    return Dataset.from_dict({"input_ids": blocks, "labels": blocks})


def make_trainer() -> Trainer:
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=256, num_key_value_heads=2, **sizes)
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return Trainer(
        model=AutoModelForCausalLM.from_config(config),
        args=TrainingArguments(
            output_dir="output",
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            weight_decay=0.1,
            lr_scheduler_type="cosine",
            warmup_steps=20,
            num_train_epochs=1,
            report_to="none",
        ),
        train_dataset=group_texts(files[:20]),
        eval_dataset=group_texts(files[60:64]),
        data_collator=default_data_collator,
    )


if __name__ == "__main__":
    trainer = make_trainer()
    trainer.train()
    print(trainer.evaluate())
