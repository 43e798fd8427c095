"""An encoder and a decoder that learn to reverse words, after Vaswani et al. 2017. It knows nothing of batchscout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

LETTERS, LENGTH, IGNORED = 26, 12, -100
PAD, BEGIN, END = LETTERS, LETTERS + 1, LETTERS + 2


class Translator(nn.Module):
    """{source (B, S), target (B, T)} to logits (B, T, V)."""

    def __init__(self, width: int = 64, num_layers: int = 2, num_heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(LETTERS + 3, width), nn.Embedding(LENGTH + 1, width)
        sizes: dict[str, Any] = {"nhead": num_heads, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(width, **sizes) for _ in range(num_layers))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(width, **sizes) for _ in range(num_layers))
        self.head = nn.Linear(width, LETTERS + 3)

    def forward(self, words: dict[str, Tensor]) -> Tensor:
        padding = words["source"] == PAD
        memory, x = (self.tokens(words[name]) + self.at(words[name]) for name in ("source", "target"))
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=padding)
        later = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device).isinf()
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=later, memory_key_padding_mask=padding)
        return self.head(x)

    def at(self, tokens: Tensor) -> Tensor:
        return self.places(torch.arange(tokens.shape[1], device=tokens.device))


class Words(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Samples are nested, ({source, target}, labels), and padded: words have 3 to 12 letters."""

    def __init__(self, count: int, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.letters = torch.randint(LETTERS, (count, LENGTH), generator=drawn)
        self.num_letters = torch.randint(3, LENGTH + 1, (count,), generator=drawn)

    def __len__(self) -> int:
        return len(self.letters)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        word = self.letters[index, : self.num_letters[index]]
        backwards = torch.cat([torch.tensor([BEGIN]), word.flip(0), torch.tensor([END])])
        inputs = {"source": filled(word, LENGTH, PAD), "target": filled(backwards[:-1], LENGTH + 1, PAD)}
        return inputs, filled(backwards[1:], LENGTH + 1, IGNORED)


def filled(tokens: Tensor, length: int, value: int) -> Tensor:
    return nn.functional.pad(tokens, (0, length - len(tokens)), value=value)


def data(num_train: int = 16_384, num_val: int = 512) -> tuple[Words, Words]:
    return Words(num_train, seed=1), Words(num_val, seed=2)
