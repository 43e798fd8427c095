"""From a `ModelConfig` to an nn.Module."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from batchscout.trainers.config import ModelConfig, TrialConfig, call_target, target_of
from batchscout.trainers.errors import LossFault, first_of
from batchscout.trainers.files import quoted
from batchscout.trainers.model.adapters import add_adapters, is_of_transformers
from batchscout.trainers.model.cross_entropy import chunked_cross_entropy, summed_cross_entropy
from batchscout.trainers.model.frozen import others_of, tensors_of
from batchscout.trainers.model.gpt import GPT
from batchscout.trainers.model.losses import shape_text
from batchscout.trainers.sources.adapted import module_of

BATCH_NORM = nn.modules.batchnorm._BatchNorm  # of every dimension, synced or not
MOST_NAMES = 3
"""The tensors of a file that are named where they do not fit."""


def build_model(config: ModelConfig, train_set: Any, initial_weights: str | None = None) -> nn.Module:
    """Build the module that `model.target` names, with the adapters that `model.peft` asks for. The data gives vocab_size and seq_len
    where kwargs leave them out.

    initial_weights: the file of the weights that it is to have, adapters aside.
    """
    target = _target(config.target)
    parameters = inspect.signature(target).parameters
    from_data = {
        name: getattr(train_set, name)
        for name in ("vocab_size", "seq_len")
        if name in parameters and name not in config.kwargs and hasattr(train_set, name)
    }
    made = call_target("model", target, {**from_data, **config.kwargs})
    model = module_of(made) or made
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model.target '{config.target}' returned a {type(model).__name__}, not an nn.Module; return the module itself"
        )
    _keep_nothing_for_a_next_token(model)
    if initial_weights is not None:
        load_weights(model, Path(initial_weights))
    if config.peft is not None:
        add_adapters(model, config.peft)
    return model


def initial_module(config: TrialConfig, train_set: Any) -> nn.Module:
    """Build the model as its seed makes it, or with the weights that it is to begin with. It is drawn on the host, so it is
    the same for every rank and device."""
    torch.manual_seed(config.seed)
    return build_model(config.model, train_set, config.initial_weights).train()  # a pretrained one has no dropout yet


def _keep_nothing_for_a_next_token(model: nn.Module) -> None:
    """Switch off the cache of keys and values that models of transformers fill in each forward, for text that is generated. A
    checkpointed block's second forward would find it filled by the first."""
    for module in model.modules():
        settings: Any = getattr(module, "config", None) if is_of_transformers(module) else None
        if getattr(settings, "use_cache", False):
            settings.use_cache = False


def _target(name: str) -> Callable[..., Any]:
    return target_of("model", name, {"gpt": GPT, "hf": hf}, "an nn.Module")


def load_weights(module: nn.Module, path: Path) -> None:
    """Give a model the weights in a file. Raises ValueError where they are not all of this model's, and no others."""
    own = tensors_of(module.state_dict())
    found = _tensors_in(path, others_of(module.state_dict()).keys())
    held = {tensor.data_ptr() for name, tensor in own.items() if name in found}  # a tied one may stand there once
    faults = {
        "lacks": [name for name, tensor in own.items() if name not in found and tensor.data_ptr() not in held],
        "has, unknown to the model,": [name for name in found if name not in own],
        "has in another shape": [
            f"{name} ({shape_text(found[name])}, not {shape_text(own[name])})"
            for name in found
            if name in own and found[name].shape != own[name].shape
        ],
    }
    told = [f"it {what} {first_of(names, MOST_NAMES)}" for what, names in faults.items() if names]
    if told:
        raise ValueError(
            f"initial_weights {quoted(path)} are not those of this model: {'; '.join(told)}; save model.state_dict() of the same "
            "model (model.target and model.kwargs), or load a transformers folder with model.kwargs {name: FOLDER, pretrained: true}"
        )
    module.load_state_dict(found, strict=False)


def _tensors_in(path: Path, others: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors in a file by their names, on the host. others: names in the model's state that no tensors have, in the file
    neither."""
    if not path.is_file():
        raise ValueError(f"initial_weights: there is no file {quoted(path)}; check the path")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"initial_weights {quoted(path)} needs the library safetensors; pip install safetensors"
        ) from error
    except OSError:
        raise
    except Exception as error:  # torch and safetensors each raise several kinds for a file that is not theirs
        raise ValueError(
            f"initial_weights {quoted(path)} cannot be read ({type(error).__name__}); write it with "
            "torch.save(model.state_dict(), ...), or as *.safetensors"
        ) from error
    if isinstance(found, dict):
        found = {name: value for name, value in found.items() if name not in others}
    if not isinstance(found, dict) or not all(isinstance(one, Tensor) for one in found.values()):
        holds = first_of([*found], MOST_NAMES) if isinstance(found, dict) else f"a {type(found).__name__}"
        raise ValueError(
            f"initial_weights {quoted(path)} holds {holds}, not tensors by their names; save model.state_dict() alone"
        )
    return found


def regularizers(config: ModelConfig) -> dict[str, float]:
    """Return which of `dropout` and `label_smoothing` the model's target takes as a number, with the one that it has.

    Label smoothing is that of the built-in cross-entropy alone: a user's own might smooth the validation loss, too.
    """
    parameters = inspect.signature(_target(config.target)).parameters
    names = ["dropout", *(["label_smoothing"] if config.target in ("gpt", "hf") else [])]
    values = {name: config.kwargs.get(name, parameters[name].default) for name in names if name in parameters}
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}


class CausalLanguageModel(nn.Module):
    """A transformers causal language model under this project's contract: batch in, (loss_sum, num_targets) out."""

    def __init__(self, inner: nn.Module, label_smoothing: float = 0.0) -> None:
        """label_smoothing: the share of each target that is spread over all tokens, in training alone."""
        super().__init__()
        self.inner = inner
        self.label_smoothing = label_smoothing
        self._head: tuple[nn.Linear, ...] = ()  # in a tuple, as it is a part of `inner` already

    def take_chunks(self, head: nn.Linear) -> None:
        """Compute the cross-entropy in chunks from here on. head: the layer that made the logits, and now passes on what it is
        given."""
        self._head = (head,)

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        return self._returned(batch).logits

    def _returned(self, batch: dict[str, Tensor]) -> Any:
        """Return what the model makes of a batch, which may say which tokens see each other."""
        told = {key: batch[key] for key in ("attention_mask", "position_ids") if key in batch}
        return self.inner(input_ids=batch["input_ids"], **told)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        returned, targets = self._returned(batch), batch["targets"]
        smoothing = self.label_smoothing if self.training else 0.0
        if self._head:
            (head,) = self._head
            loss_sum, count = chunked_cross_entropy(returned.logits, head.weight, targets, smoothing, bias=head.bias)
        else:
            loss_sum, count = summed_cross_entropy(returned.logits, targets, smoothing)
        balance = getattr(returned, "aux_loss", None) if self.training else None
        return (loss_sum if balance is None else loss_sum + self._balance_factor() * balance * count), count

    def _balance_factor(self) -> float:
        """Return by what the model multiplies the balance of its experts, which it adds to the mean that it returns itself. It is a term of
        the whole micro-batch, so each has it as often as it has targets."""
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            if hasattr(self.inner, name):
                return getattr(self.inner, name)
        raise LossFault(
            f"{type(self.inner).__name__} returns the balance of its experts (output_router_logits), and nothing says how much of it belongs to "
            "the loss; set output_router_logits: false in model.kwargs.config, or return the sum of both from a module of your own"
        )


def hf(
    *,
    name: str | None = None,
    model_type: str | None = None,
    pretrained: bool = False,
    vocab_size: int | None = None,
    config: dict[str, Any] | None = None,
    label_smoothing: float = 0.0,
) -> nn.Module:
    """Build a transformers causal LM from `name` (a hub name or local folder), or from `model_type` and `config`."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ModuleNotFoundError as error:
        raise ValueError("model.target 'hf' needs transformers; pip install 'batchscout[hf]'") from error
    overrides = dict(config or {})
    if vocab_size is not None and not pretrained:
        overrides["vocab_size"] = vocab_size
    if name is not None and model_type is None:
        if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
            raise ValueError(
                f"model.kwargs.name is '{name}', which is no folder; name one that save_pretrained has written (relative paths start "
                "where the command runs), or a model on the hub"
            )
        settings = AutoConfig.from_pretrained(name, **overrides)
    elif model_type is not None and name is None:
        settings = AutoConfig.for_model(model_type, **overrides)
    else:
        raise ValueError("model.kwargs of 'hf' need either name or model_type; give one of the two")
    # Weights and gradients in float32 whatever the hub's file says: precision is the trial's, as autocast.
    if pretrained and name is not None:
        inner = AutoModelForCausalLM.from_pretrained(name, config=settings, dtype=torch.float32)
    else:
        inner = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    return CausalLanguageModel(inner, label_smoothing)


def with_synced_batch_norm(module: nn.Module, device: torch.device) -> nn.Module:
    """Turn every BatchNorm into SyncBatchNorm. Raises ValueError on a CPU, where torch has none."""
    if num_batch_norms(module) and device.type == "cpu":
        raise ValueError(
            "sync_batch_norm needs GPUs: torch's SyncBatchNorm does not run on a CPU; use world_size: 1, or GroupNorm"
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(module)


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Return the means and variances that BatchNorm keeps for evaluations."""
    norms = [module for module in model.modules() if isinstance(module, BATCH_NORM)]
    return [kept for norm in norms for kept in (norm.running_mean, norm.running_var) if kept is not None]


def num_batch_norms(model: nn.Module) -> int:
    """Count the layers whose statistics depend on the micro-batch: with them a split of the batch is another
    experiment."""
    return sum(isinstance(module, BATCH_NORM) for module in model.modules())


def switch_off_dropout(model: nn.Module) -> int:
    """Set every dropout probability of the model to 0, and return how many there were.

    They are found by name: the `p` of dropout layers, and any `attention_dropout`, `drop_path` or the like that a layer
    or its `config` holds as a number. What a forward draws otherwise goes on, see
    `batchscout.trainers.model.adding_up.loss_of_parts`.
    """
    return sum(_without_dropout(module) for module in model.modules())


def _without_dropout(module: nn.Module) -> int:
    attributes = vars(module)
    names = _dropout_probabilities(attributes, also_p=_is_dropout(module))
    attributes.update(dict.fromkeys(names, 0.0))
    config = attributes.get("config")
    of_config = _dropout_probabilities(getattr(config, "__dict__", {}))
    if of_config:  # a copy: the user's code may build the next model from the same object
        attributes["config"] = copy.copy(config)
        vars(attributes["config"]).update(dict.fromkeys(of_config, 0.0))
    return len(names) + len(of_config)


def _is_dropout(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return isinstance(module, nn.modules.dropout._DropoutNd) or "drop" in name or name == "stochasticdepth"


def _dropout_probabilities(attributes: dict[str, Any], *, also_p: bool = False) -> list[str]:
    """Return the names of the attributes that hold a probability of dropout above 0."""
    named = [name for name in attributes if "drop" in name.lower() or (also_p and name == "p")]
    return [name for name in named if isinstance(attributes[name], float) and 0 < attributes[name] <= 1]
