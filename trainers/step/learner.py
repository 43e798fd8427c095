"""A model under its trial's settings, and all that an optimizer step moves of it: what a run trains, and what its memory is predicted
of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.model.activation_checkpointing import apply_to_blocks
from batchscout.trainers.model.knobs import on_device, with_knobs
from batchscout.trainers.model.losses import autocasting
from batchscout.trainers.model.models import running_statistics, switch_off_dropout
from batchscout.trainers.model.parallel import distribute, leaves_of
from batchscout.trainers.noise.gradient_noise import MicroGradientNorms
from batchscout.trainers.step.accumulation import accumulate_gradient, normalise_and_clip
from batchscout.trainers.step.optimizers import build_optimizer
from batchscout.trainers.step.weight_average import WeightAverage


class Learner:
    """The module, the model that ranks call, and the optimizer; `accumulate` and `update` are a step."""

    def __init__(
        self,
        config: TrialConfig,
        module: nn.Module,
        device: torch.device,
        *,
        head_name: str | None,
        lengths_differ: bool = False,
        distribute: Callable[[nn.Module, TrialConfig, torch.device], nn.Module] = distribute,
    ) -> None:
        """module: as its seed made it, on the host; it is changed in place. head_name: of `head_if_wanted`."""
        self.config, self.device, self.module = config, device, module
        self.nominal_targets = 1.0
        """What every loss is divided by before its backward pass, so that a sum, too, stays within float16's range."""
        self.num_dropouts_off = 0 if config.dropout else switch_off_dropout(module)
        loss = with_knobs(module, config, head_name)
        self.model = distribute(apply_to_blocks(module, config, lengths_differ=lengths_differ), config, device)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(module, config)
        half_life = config.ema_half_life_samples
        self.average = WeightAverage([*self.parameters, *running_statistics(module)], half_life) if half_life else None
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "float16")
        self.loss_function = autocasting(on_device(loss, module, config), config.precision, device)
        self.norms = MicroGradientNorms(leaves_of(module), config.world_size) if config.statistics else None

    def accumulate(self, micro_batches: Iterable[Any], num_micro_batches: int) -> tuple[Tensor, Tensor]:
        """Put the gradient of a step into .grad, scaled and not yet divided; return this rank's (loss_sum,
        num_targets)."""
        self.optimizer.zero_grad(set_to_none=True)
        return accumulate_gradient(
            self.model,
            self.loss_function,
            micro_batches,
            num_micro_batches=num_micro_batches,
            scale=self.scaler.scale(torch.ones((), device=self.device)) / self.nominal_targets,
            norms=self.norms,
        )

    def update(self, factor: Tensor, num_samples: int) -> Tensor:
        """Multiply the summed gradient by the factor, clip it, step, and return its norm before clipping. num_samples: those of the
        whole step."""
        self.scaler.unscale_(self.optimizer)
        norm = normalise_and_clip(self.parameters, factor, self.config.optimizer.max_gradient_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.average is not None:
            self.average.update(num_samples)
        return norm
