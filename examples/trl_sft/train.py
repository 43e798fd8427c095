"""Instructions that a small language model learns to follow, trained by TRL's SFTTrainer: `python train.py` trains it."""

from __future__ import annotations

import random

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = ["<pad>", "<end>", "reverse", "sort", *"abcdefghij"]


def instructions(count: int, seed: int) -> Dataset:
    """{prompt, completion}: letters to reverse or to sort. The loss is that of the completion alone."""
    drawn, rows = random.Random(seed), []
    for _ in range(count):
        letters = [drawn.choice(WORDS[4:]) for _ in range(drawn.randint(2, 8))]
        task = drawn.choice(["reverse", "sort"])
        answer = letters[::-1] if task == "reverse" else sorted(letters)
        rows.append({"prompt": f"{task} {' '.join(letters)} ", "completion": f"{' '.join(answer)} <end>"})
    return Dataset.from_list(rows)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def make_trainer() -> SFTTrainer:
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=len(WORDS), num_key_value_heads=2, pad_token_id=0, **sizes)
    return SFTTrainer(
        model=AutoModelForCausalLM.from_config(config),
        args=SFTConfig(
            output_dir="output",
            per_device_train_batch_size=16,
            learning_rate=2e-3,
            lr_scheduler_type="cosine",
            num_train_epochs=1,
            bf16=False,
            report_to="none",
        ),
        train_dataset=instructions(4096, seed=0),
        eval_dataset=instructions(256, seed=1),
        processing_class=make_tokenizer(),
    )


if __name__ == "__main__":
    trainer = make_trainer()
    trainer.train()
    print(trainer.evaluate())
