"""Lines of Python that build the optimizer."""

from __future__ import annotations

from batchscout.orchestrator.output.exports.schedule_lines import factor_lines
from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.trainers.config import OptimizerConfig
from batchscout.trainers.sources.settings import GROUPS

NOMINAL = "targets of the first micro-batch: what is divided by them stays within float16's range"
"""What a loop in float16 divides each summed loss by, and takes back from the gradient."""


def recipe_lines(r: Recommendation) -> list[str]:
    """Return the two functions that a loop takes its learning rate and its optimizer from."""
    return [
        "def learning_rate_factor(step):",
        *factor_lines(r),
        "",
        "",
        "def build_optimizer(model):",
        *optimizer_lines(r, parameters_of="model", model="model"),
        "    return optimizer",
        "",
        "",
    ]


def optimizer_lines(r: Recommendation, *, parameters_of: str, model: str) -> list[str]:
    """Return the body of a function up to `optimizer = ...`, as the study built it.

    parameters_of, model: the function's names for what has all parameters, and for the module that the study trained.
    """
    optimizer, rate = r.optimizer, r.learning_rate
    if optimizer.param_groups == GROUPS:  # which are made of the object that was studied, and not of a model
        optimizer = optimizer.model_copy(update={"param_groups": None})
    if optimizer.type == "own":
        return _own_lines(optimizer, rate, parameters_of, model)
    return _built_in_lines(optimizer, rate, parameters_of, model)


def _built_in_lines(optimizer: OptimizerConfig, rate: float, parameters_of: str, model: str) -> list[str]:
    beta1, beta2 = optimizer.betas
    decay = optimizer.weight_decay
    of_the_rest = {"weight_decay": decay} if optimizer.param_groups else {}
    further = "".join(f", {name}={value!r}" for name, value in {**of_the_rest, **optimizer.kwargs}.items())
    of_adam = f"lr={rate!r}, betas=({beta1}, {beta2}), eps={optimizer.eps!r}"
    grouped = (
        _own_groups(optimizer.param_groups, rate, model)
        if optimizer.param_groups
        else [
            f"    matrices = [p for p in {parameters_of}.parameters() if p.dim() >= 2]",
            f"    others = [p for p in {parameters_of}.parameters() if p.dim() < 2]",
            f"    groups = [{{'params': matrices, 'weight_decay': {decay}}}, {{'params': others, 'weight_decay': 0.0}}]",
        ]
    )
    match optimizer.type:
        case "sgd":
            return [*grouped, f"    optimizer = torch.optim.SGD(groups, lr={rate!r}, momentum={beta1}{further})"]
        case "adafactor":
            return [*grouped, f"    optimizer = torch.optim.Adafactor(groups, lr={rate!r}{further})"]
        case "adamw_8bit" | "adamw_4bit":
            name = {"adamw_8bit": "AdamW8bit", "adamw_4bit": "AdamW4bit"}[optimizer.type]
            return [
                "    from torchao.optim import " + name,
                "",
                *grouped,
                f"    optimizer = {name}(groups, {of_adam}{further})",
            ]
        case "muon":
            return _muon_lines(optimizer, rate, of_adam, parameters_of, model)
        case _:
            return [*grouped, f"    optimizer = torch.optim.AdamW(groups, {of_adam}{further})"]


def _muon_lines(optimizer: OptimizerConfig, rate: float, of_adam: str, parameters_of: str, model: str) -> list[str]:
    """Return the lines that build the two optimizers of muon."""
    decay, arguments = optimizer.weight_decay, {"adjust_lr_fn": "match_rms_adamw"} | optimizer.kwargs
    further = "".join(f", {name}={value!r}" for name, value in arguments.items())
    return [
        "    from batchscout.trainers.step.optimizers import Together  # of batchscout: it steps both as one",
        "",
        f"    blocks = {model}.blocks  # the ModuleList of your model's repeated layers",
        "    inner = {id(p) for p in blocks.parameters() if p.dim() == 2}",
        f"    matrices = [p for p in {parameters_of}.parameters() if id(p) in inner]",
        f"    others = [p for p in {parameters_of}.parameters() if id(p) not in inner]",
        f"    groups = [{{'params': [p for p in others if p.dim() >= 2], 'weight_decay': {decay}}}, "
        "{'params': [p for p in others if p.dim() < 2], 'weight_decay': 0.0}]",
        f"    muon = torch.optim.Muon(matrices, lr={rate!r}, weight_decay={decay}{further})",
        f"    optimizer = Together([muon, torch.optim.AdamW(groups, {of_adam})])",
    ]


def _own_lines(optimizer: OptimizerConfig, rate: float, parameters_of: str, model: str) -> list[str]:
    assert optimizer.target, "it was checked"
    further = "".join(f", {key}={value!r}" for key, value in optimizer.kwargs.items())
    trained, lines = f"{parameters_of}.parameters()", [""]
    if optimizer.param_groups:
        trained, lines = "groups", _own_groups(optimizer.param_groups, rate, model)
    return [
        _import_of(optimizer.target),
        *lines,
        f"    optimizer = {optimizer.target.partition(':')[2]}({trained}, lr={rate!r}{further})",
        "    if hasattr(optimizer, 'train'):  # as schedule-free ones have it: call eval() before you validate or save, and train() after",
        "        optimizer.train()",
    ]


def _own_groups(path: str, rate: float, model: str) -> list[str]:
    """Return the lines that make the groups of the user's callable, the first of which trains at the recommended rate."""
    return [
        _import_of(path),
        "",
        f"    groups = {path.partition(':')[2]}({model})",
        f"    scale = {rate!r} / groups[0].get('lr', {rate!r})  # the first group trains at the recommended rate",
        f"    groups = [{{**group, 'lr': scale * group.get('lr', {rate!r})}} for group in groups]",
    ]


def _import_of(path: str) -> str:
    module, _, name = path.partition(":")
    return f"    from {module} import {name.partition('.')[0]}"
