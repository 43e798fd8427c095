"""torch's optimizers may be handed a closure that evaluates the model. No run here does so; optimizers of our own take one all the
same, as whoever is handed an exported one may have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Closure = Callable[[], Any] | None


def loss_of(closure: Closure) -> Any:
    """Evaluate the model with gradients, and return its loss; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
