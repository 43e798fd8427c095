"""The memory knobs that change a model or its loss, put to work; those of the optimizer are in `trainers/step`."""

from __future__ import annotations

from torch import nn

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.data.samples import SampleSet
from batchscout.trainers.knobs import activation_offload, bfloat16_weights, chunked_cross_entropy
from batchscout.trainers.model.activation_offload import ActivationOffload
from batchscout.trainers.model.linear_head import head_of, with_chunks
from batchscout.trainers.model.losses import LossFunction, loss_function
from batchscout.trainers.model.models import BATCH_NORM


def head_if_wanted(config: TrialConfig, train_set: SampleSet) -> str | None:
    """Return the name of the layer that `with_knobs` has to know; None where no knob needs one. Raises ValueError where a knob does,
    and the model has none."""
    return head_of(config, train_set) if chunked_cross_entropy.NAME in config.memory_knobs else None


def with_knobs(module: nn.Module, config: TrialConfig, head_name: str | None) -> LossFunction:
    """Change the module as the trial's knobs ask, in place, and return the loss that belongs to it. head_name: of
    `head_if_wanted`."""
    if bfloat16_weights.NAME in config.memory_knobs:
        _to_bfloat16(module)
    loss = loss_function(config.loss)
    return with_chunks(module, config, head_name, loss) if chunked_cross_entropy.NAME in config.memory_knobs else loss


def on_device(loss: LossFunction, module: nn.Module, config: TrialConfig) -> LossFunction:
    """Return the loss as the trial's knobs want it of a module that is on its device by now."""
    return ActivationOffload(module).during(loss) if activation_offload.NAME in config.memory_knobs else loss


def _to_bfloat16(module: nn.Module) -> None:
    """Turn the weights to bfloat16; tied ones stay tied. Those of BatchNorm stay in float32, as its statistics do, and so do
    buffers."""
    kept = {id(p) for layer in module.modules() if isinstance(layer, BATCH_NORM) for p in layer.parameters()}
    for parameter in module.parameters():
        if parameter.is_floating_point() and id(parameter) not in kept:
            parameter.data = parameter.data.bfloat16()
