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


class Scaled(Headed):
    """Its logits are scaled in place, so they are the very tensor that the head has returned."""

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        logits *= 0.1
        return logits


class Masked(Headed):
    """Classes that no target may be are masked through a view of the logits."""

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        logits.flatten(0, 1)[:, -1] = -1e4
        return logits


class Twice(Headed):
    """It corrects itself by what its head makes of it. The hidden states are as wide as the logits."""

    def __init__(self, *, vocab_size: int) -> None:
        super().__init__(vocab_size=vocab_size, hidden_dim=vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        first = super().forward(input_ids)
        return self.head(first.tanh())


def doubled(layer: nn.Module, given: object, output: Tensor) -> Tensor:
    return 2 * output


class Sharpened(Headed):
    """A hook of its own changes what its head returns."""

    def __init__(self, *, vocab_size: int) -> None:
        super().__init__(vocab_size=vocab_size)
        self.head.register_forward_hook(doubled)


class Slowed(Headed):
    """Its logits pass on a tenth of their gradient."""

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: gradient / 10)
        return logits
