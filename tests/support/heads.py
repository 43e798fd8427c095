"""Models that end in a linear layer, and some whose logits are not what it returns."""

from __future__ import annotations

from torch import Tensor, nn


class Headed(nn.Module):
    """A model that knows nothing of this project, with a bias at its head."""

    def __init__(self, *, vocab_size: int, hidden_dim: int = 16, num_layers: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_dim)
        self.blocks = nn.ModuleList(nn.Linear(hidden_dim, hidden_dim) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_dim)
        self.head = nn.Linear(hidden_dim, vocab_size, bias=bias)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(self.norm(x))


class Capped(Headed):
    """Its logits are capped after the head, as some models do."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return 30 * (super().forward(input_ids) / 30).tanh()
