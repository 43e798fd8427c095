"""What there is before finetuning: `python prepare.py` trains a small Llama to spell, and writes it, its tokenizer and questions."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "<end>", "<user>", "<assistant>", "spell", "reverse", *"abcdefghij"]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2}


def conversations(count: int, task: str, seed: int) -> list[dict[str, Any]]:
    """{messages}: letters to repeat (spell), or to reverse."""
    drawn, rows = random.Random(seed), []
    for _ in range(count):
        letters = [drawn.choice(WORDS[6:]) for _ in range(drawn.randint(2, 8))]
        answer = letters if task == "spell" else letters[::-1]
        asked = {"role": "user", "content": f"{task} {' '.join(letters)}"}
        rows.append({"messages": [asked, {"role": "assistant", "content": " ".join(answer)}]})
    return rows


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    made.chat_template = TEMPLATE
    return made


def pretrained(tokenizer: PreTrainedTokenizerFast, num_steps: int) -> Any:
    """Return a model that has learnt to spell."""
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", vocab_size=len(WORDS), num_key_value_heads=2, **SIZES, **ids)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    texts = [tokenizer.apply_chat_template(one["messages"], tokenize=False) for one in conversations(4096, "spell", 0)]
    for step in range(num_steps):
        batch = tokenizer(texts[32 * step % 4096 :][:32], padding=True, return_tensors="pt", add_special_tokens=False)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        optimizer.zero_grad()
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="of the training before finetuning")
    parser.add_argument("--into", type=Path, default=Path(), help="the folder that it is written to")
    chosen = parser.parse_args()
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(chosen.into / "base")
    pretrained(tokenizer, chosen.steps).save_pretrained(chosen.into / "base")
    for name, count, seed in (("train", 4096, 1), ("val", 256, 2)):
        lines = [json.dumps(row) for row in conversations(count, "reverse", seed)]
        (chosen.into / f"{name}.jsonl").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
