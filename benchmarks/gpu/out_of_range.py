"""A model that meets targets out of range in micro-batches of one size: on a GPU a device assert, after which its process is
of no use."""

from __future__ import annotations

from torch import Tensor

from batchscout.trainers.model.gpt import GPT

SIZE_OF_THE_FAULT = 3


class OutOfRange(GPT):
    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        targets = batch["targets"]
        if len(targets) == SIZE_OF_THE_FAULT:
            batch = {**batch, "targets": targets + self.head.weight.shape[0]}
        return super().forward(batch)
