"""What the key `loss` may say: the user's own function, a criterion of torch's, or the loss that the module returns itself.
Loads no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_serializer, model_validator

from batchscout.trainers.strict import Strict

IGNORED_TARGET = -100
"""A target that does not count, as torch and transformers have it."""


class OwnLoss(Strict):
    """Your own loss. `loss: package.module:callable` is short for it."""

    type: Literal["own"] = "own"
    """Your own."""
    target: str
    """The import path, `package.module:callable`. It is called as loss(module, batch) and returns (loss_sum, num_targets): the
    summed loss and the number of targets in that sum."""

    @model_serializer
    def _in_short(self) -> str:
        return self.target


class _OfOutputs(Strict):
    """A criterion of torch's, of what the module returns for the inputs and of the batch's targets."""

    targets: str = "labels"
    """Where a batch is a dictionary: the key of its targets. The module is called with all others by their names. Where it
    is a tuple or list, the last member is the targets, and the module is called with the others in their order."""


class CrossEntropyCriterion(_OfOutputs):
    """`cross_entropy` of logits and classes. The logits have a dimension of classes more than the targets have: the last (batch,
    tokens, classes) or the second (batch, classes, height, width). Every target but the ignored ones counts."""

    type: Literal["cross_entropy"] = "cross_entropy"
    """torch's cross-entropy."""
    ignore_index: int = IGNORED_TARGET
    """The target that does not count."""


class SquaredErrorCriterion(_OfOutputs):
    """`mse`, the squared error of outputs and targets. Every number of the targets counts."""

    type: Literal["mse"] = "mse"
    """The squared error."""


class BinaryCrossEntropyCriterion(_OfOutputs):
    """`bce_with_logits`, the binary cross-entropy of logits and targets between 0 and 1. Every number of the targets counts."""

    type: Literal["bce_with_logits"] = "bce_with_logits"
    """The binary cross-entropy of logits."""


class MeanLoss(_OfOutputs):
    """`mean`: the module computes the loss itself, and returns it as a mean: alone, as `loss`, or as the one scalar in a tuple. It is
    called with all of the batch, targets included: a tuple's members in their order, a dictionary's by their names. The mean is
    multiplied by the number of what it is a mean over; before anything starts it is seen whether that holds."""

    type: Literal["mean"] = "mean"
    """The mean that the module returns."""
    over: str = "targets"
    """What it is a mean over: targets (those that are not ignored), samples, or whatever a callable of yours counts, named as
    `package.module:callable`: it takes the batch and returns the number."""
    ignore_index: int = IGNORED_TARGET
    """The target that does not count."""

    @model_validator(mode="after")
    def _counts_something(self) -> MeanLoss:
        if self.over not in ("targets", "samples") and ":" not in self.over:
            raise ValueError(
                f"over is '{self.over}'; use targets, samples, or your own count as package.module:callable"
            )
        return self


class TransformersLoss(Strict):
    """`transformers`: the batch is a dictionary with `labels`, and the module, a model of that library, is called with it by
    names and returns the mean loss over the labels that are not -100 as `outputs.loss`."""

    type: Literal["transformers"] = "transformers"
    """The model's own."""


Criterion = CrossEntropyCriterion | SquaredErrorCriterion | BinaryCrossEntropyCriterion
BuiltIn = Literal["cross_entropy", "mse", "bce_with_logits", "mean", "transformers"]
NAMES = get_args(BuiltIn)


def _written_out(value: Any) -> Any:
    """Read `cross_entropy` as {type: cross_entropy}, and an import path as {type: own, target: it}."""
    if isinstance(value, str):
        value = {"type": "own", "target": value} if ":" in value else {"type": value}
    if isinstance(value, dict) and value.get("type") not in (*NAMES, "own"):
        raise ValueError(
            f"'{value.get('type')}' is no loss that is built in; use {', '.join(NAMES)}, or your own as package.module:callable"
        )
    if isinstance(value, dict) and str(value.get("target")).startswith(("torch.nn.", "torch.nn:")):
        raise ValueError(
            f"'{value['target']}' takes outputs and targets, and a loss of your own is called as loss(module, batch); use one of cross_entropy, "
            "mse and bce_with_logits, or a function of your own that calls it"
        )
    return value


LossByType = Annotated[OwnLoss | Criterion | MeanLoss | TransformersLoss, Field(discriminator="type")]
_WrittenLoss = BuiltIn | Annotated[str, Field(pattern=":")] | LossByType
Loss = Annotated[LossByType, BeforeValidator(_written_out, json_schema_input_type=_WrittenLoss)]


def spoken(loss: Loss) -> str:
    """Return the loss as a study file's short form names it."""
    return loss.target if isinstance(loss, OwnLoss) else loss.type


def import_path(loss: Loss | None) -> str:
    """Return where the user's own loss, or count, is imported from; empty for any other."""
    match loss:
        case OwnLoss():
            return loss.target
        case MeanLoss() if ":" in loss.over:
            return loss.over
        case _:
            return ""
