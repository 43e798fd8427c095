"""Builds a run's optimizer: those that are built in, and a user's own by its import path."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchscout.trainers.config import OptimizerConfig, TrialConfig, resolve
from batchscout.trainers.knobs import bfloat16_weights, optimizer_offload
from batchscout.trainers.model.activation_checkpointing import as_it_was_made
from batchscout.trainers.model.blocks import find_blocks
from batchscout.trainers.step.closures import Closure, loss_of
from batchscout.trainers.step.optimizer_offload import OnTheHost
from batchscout.trainers.step.stochastic_rounding import StochasticAdamW

RATIO = "learning_rate_ratio"
"""The key of a parameter group that holds its learning rate as a multiple of the run's; without it that is 1."""
ParamGroups = list[dict[str, Any]]


def build_optimizer(model: nn.Module, config: TrialConfig) -> Optimizer:
    """Build the optimizer that the trial names. Raises ValueError in the user's words where it does not fit the model."""
    optimizer = _built(model, [p for p in model.parameters() if p.requires_grad], config)
    if optimizer_offload.NAME in config.memory_knobs:
        optimizer = OnTheHost(optimizer)
    if config.optimizer.param_groups or config.optimizer.type == "own":
        for group in optimizer.param_groups:  # its own callable may have given them rates of their own, too
            group[RATIO] = float(group["lr"]) / config.learning_rate
    return optimizer


def fixed_rates(model: nn.Module, config: TrialConfig) -> tuple[list[float], int]:
    """Return the learning rates of the groups that do not follow the run's, and how many groups there are. Only what a user's own callable
    makes may have such groups."""
    of_run, of_twice_that = (
        [float(group["lr"]) for group in build_optimizer(model, one).param_groups]
        for one in (config, config.model_copy(update={"learning_rate": 2 * config.learning_rate}))
    )
    pairs = zip(of_run, of_twice_that, strict=False)  # a callable may make as many groups as it likes
    return [rate for rate, other in pairs if not math.isclose(other, 2 * rate)], len(of_run)


def _built(model: nn.Module, parameters: Sequence[nn.Parameter], config: TrialConfig) -> Optimizer:
    settings = config.optimizer
    groups = _groups(model, parameters, config)
    decay = {"weight_decay": settings.weight_decay}  # of groups that say nothing
    match settings.type:
        case "adamw":
            if bfloat16_weights.NAME in config.memory_knobs:
                return _called(StochasticAdamW, groups, config, **decay, **_of_adam(settings))
            fused = _can_fuse(parameters)
            return _called(torch.optim.AdamW, groups, config, **decay, **_of_adam(settings), fused=fused)
        case "sgd":
            return _sgd(parameters, groups, config, **decay)
        case "muon":
            return _muon(model, parameters, config)
        case "adafactor":
            return _called(torch.optim.Adafactor, groups, config, **decay)
        case "adamw_8bit" | "adamw_4bit":
            return _called(_low_bit(settings.type), groups, config, **decay, **_of_adam(settings))
        case "own":
            return _own(groups, config)


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Give every group the run's learning rate, times its own ratio to it."""
    for group in optimizer.param_groups:
        rate = learning_rate * group.get(RATIO, 1.0)
        if isinstance(group["lr"], Tensor):  # torchao keeps it so, for its compiled step
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _groups(
    model: nn.Module, parameters: Sequence[nn.Parameter], config: TrialConfig
) -> ParamGroups | list[nn.Parameter]:
    """Return the parameters as the user's callable groups them; without one by whether they decay, which an optimizer of the
    user's own decides itself."""
    settings = config.optimizer
    if settings.param_groups is not None:
        return _own_groups(model, parameters, settings.param_groups, config.learning_rate)
    return list(parameters) if settings.type == "own" else _groups_by_decay(parameters, settings.weight_decay)


def _groups_by_decay(parameters: Sequence[nn.Parameter], weight_decay: float) -> ParamGroups:
    """Return the parameters in two groups: weights decay, biases and norms do not."""
    groups: ParamGroups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _can_fuse(parameters: Sequence[nn.Parameter]) -> bool:
    """True if torch's fused kernels take them: of complex numbers they have none."""
    return not any(parameter.is_complex() for parameter in parameters)


def _of_adam(settings: OptimizerConfig) -> dict[str, Any]:
    return {"betas": settings.betas, "eps": settings.eps}


def _called(make: Callable[..., Any], groups: ParamGroups | list[nn.Parameter], config: TrialConfig, **own: Any) -> Any:
    """Return make(groups, ...) with the user's further arguments. Raises ValueError where they do not fit."""
    arguments = {"lr": config.learning_rate, **own, **config.optimizer.kwargs}
    name = config.optimizer.name
    try:
        inspect.signature(make).bind(groups, **arguments)
    except TypeError as error:
        takes = ", ".join(list(inspect.signature(make).parameters)[1:])
        raise ValueError(f"optimizer.kwargs do not fit {name}: {error}; it takes: {takes}") from error
    try:
        return make(groups, **arguments)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise ValueError(
            f"optimizer {name} cannot be made of this model's parameters: {error}; check optimizer.kwargs, or say with "
            "optimizer.param_groups which parameters it takes how"
        ) from error


def _sgd(
    parameters: Sequence[nn.Parameter], groups: ParamGroups | list[nn.Parameter], config: TrialConfig, **decay: float
) -> Optimizer:
    """Of shards torch has no fused SGD."""
    momentum, fused = config.optimizer.betas[0], config.parallel != "fsdp" and _can_fuse(parameters)
    optimizer = _called(torch.optim.SGD, groups, config, **decay, momentum=momentum, fused=fused)
    if momentum and not config.optimizer.kwargs.get("dampening"):  # which leaves the first gradient as it is
        for parameter in parameters:  # left to the first step, float16 that skips it would leave what was in memory
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _muon(model: nn.Module, parameters: Sequence[nn.Parameter], config: TrialConfig) -> Optimizer:
    """Muon for the matrices of the blocks, AdamW for embeddings, head, norms and biases.

    Muon's updates are scaled to the size of AdamW's, so that both go by one learning rate and weight decay (Liu et al. 2025, arXiv
    2502.16982).
    """
    if config.parallel == "fsdp":
        raise ValueError(
            "optimizer muon needs whole matrices, and parallel: fsdp shards them; use parallel: ddp, or optimizer adamw"
        )
    blocks = find_blocks(model, config.model.blocks)
    if not blocks:
        raise ValueError(
            "optimizer muon is for the matrices of a model's repeated blocks, and this model has no ModuleList or Sequential of "
            "them; name it under model.blocks, or name torch.optim:Muon as optimizer.target with your own optimizer.param_groups"
        )
    matrices = {id(p): p for block in blocks for p in block.module.parameters() if p.requires_grad and p.dim() == 2}
    others = [p for p in parameters if id(p) not in matrices]
    if not matrices:
        raise ValueError("optimizer muon is for matrices, and the model's blocks have none; use optimizer adamw")
    settings = config.optimizer
    decay, of_blocks = settings.weight_decay, [{"params": list(matrices.values())}]
    muon = _called(torch.optim.Muon, of_blocks, config, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    rest = _groups_by_decay(others, decay)
    if not rest:
        return muon
    adamw = torch.optim.AdamW(rest, lr=config.learning_rate, fused=_can_fuse(others), **_of_adam(settings))
    return Together([muon, adamw])


class Together(Optimizer):
    """Several optimizers that step as one, each with parameters of its own. Their groups and states are this one's."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = members
        super().__init__([group for member in members for group in member.param_groups], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = loss_of(closure)
        for member in self.members:
            member.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # which makes groups and state anew
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for member in self.members:
            member.state = self.state
            member.param_groups = [next(groups) for _ in member.param_groups]


def _low_bit(name: str) -> Callable[..., Any]:
    try:
        from torchao import optim  # pyright: ignore[reportMissingImports]  (an extra)
    except ImportError as error:
        raise ValueError(f"optimizer {name} is torchao's, which is not installed here; pip install torchao") from error
    return {"adamw_8bit": optim.AdamW8bit, "adamw_4bit": optim.AdamW4bit}[name]


def _own(groups: ParamGroups | list[nn.Parameter], config: TrialConfig) -> Optimizer:
    settings = config.optimizer
    assert settings.target, "the configuration was checked"
    make = resolve(settings.target)
    if not callable(make):
        raise ValueError(
            f"optimizer.target {settings.target} is a {type(make).__name__}; name a callable that returns an optimizer"
        )
    optimizer = _called(make, groups, config)
    _check(optimizer, settings.target)
    if _has_modes(optimizer):
        optimizer.train()
    return optimizer


def _has_modes(optimizer: Any) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


@contextlib.contextmanager
def evaluating(optimizer: Any) -> Iterator[None]:
    """Let the model have the weights that are evaluated, where an optimizer of the user's own steps from others: those of schedule-free
    ones are an average (Defazio et al. 2024, arXiv 2405.15682)."""
    if not _has_modes(optimizer):
        yield
        return
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()


def _own_groups(model: nn.Module, parameters: Sequence[nn.Parameter], path: str, learning_rate: float) -> ParamGroups:
    """Return the groups that the user's callable makes, the first with the run's learning rate."""
    with as_it_was_made(model):
        groups = resolve(path)(model)
        groups = list(groups) if isinstance(groups, Iterator) else groups
    if not isinstance(groups, Iterable) or not all(isinstance(group, dict) and "params" in group for group in groups):
        raise ValueError(
            f"optimizer.param_groups {path} returned {_described(groups)}; return a list of dictionaries, each with `params`"
        )
    groups = [{**group, "params": _listed(group["params"])} for group in groups]
    _check_all_are_there(model, parameters, groups, path)
    with_rate = [group for group in groups if "lr" in group]
    if not with_rate:
        return groups
    if len(with_rate) < len(groups):
        raise ValueError(
            f"optimizer.param_groups {path} gives {len(with_rate)} of {len(groups)} groups an lr; give it to all, so that their "
            "ratios are known, or to none"
        )
    first = groups[0]["lr"]
    return [{**group, "lr": learning_rate * group["lr"] / first} for group in groups]


def _described(groups: object) -> str:
    return f"a list with {type(groups[0]).__name__}" if isinstance(groups, list) and groups else type(groups).__name__


def _listed(params: Any) -> list[nn.Parameter]:
    return [params] if isinstance(params, nn.Parameter) else list(params)


def _check_all_are_there(model: nn.Module, parameters: Sequence[nn.Parameter], groups: ParamGroups, path: str) -> None:
    """Raise ValueError where a parameter that is to be trained is in no group."""
    there = {id(p) for group in groups for p in group["params"]}
    names = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in there]
    if names:
        raise ValueError(
            f"optimizer.param_groups {path} leaves out {len(names)} of the {len(parameters)} parameters that are trained, {names[0]} "
            "among them; put them into a group, or freeze them (requires_grad_(False)) where the model is built"
        )


def _check(optimizer: object, target: str) -> None:
    """Raise ValueError where a training loop that knows nothing of this optimizer would use it wrongly."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer.target {target} returned a {type(optimizer).__name__}; return a torch.optim.Optimizer"
        )
    if not all("lr" in group for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer.target {target} returned an optimizer whose groups have no lr, which a study would have to change; name another"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer.target {target} asks for a closure, to evaluate the loss several times a step, which accumulation over "
            "micro-batches does not allow; name another optimizer"
        )
