"""Is (m x k) really the same as (1 x mk) for this model? Several splits of one effective batch, from the same
weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from orchestrator.config.stages import Equivalence, Frontier
from orchestrator.stages.chosen import chosen_mode, chosen_split
from orchestrator.stages.context import StageContext
from orchestrator.stages.figures import Axis, Figure, Line, Mark, Series, short_name
from orchestrator.stages.findings import concluded, found
from orchestrator.stages.stage import Stage
from orchestrator.study.state import Conclusion, Study
from orchestrator.study.trial import Proposal, Trial, TrialState
from orchestrator.units import number_text
from trainers.config import Split, TrialConfig

# In float32 the splits differ by the order of summation alone; in 20 steps of AdamW that grows to 1e-5.
FLOAT32_TOLERANCE = 1e-4
# In low precision two splits may differ by as much as one of them differs from its own run in float32: a fault in the
# split does not change that distance. (A GPT of 0.9 M parameters in bfloat16, 5 to 20 steps: 1.5e-2 to 2.7e-2 from
# float32, and 0.3e-2 to 1.1e-2 between splits.) This constant stands in where the float32 run does not fit.
LOW_PRECISION_TOLERANCE = 2e-2


@dataclass(frozen=True)
class EquivalenceFindings:
    STAGE: ClassVar[str] = "equivalence"

    tolerance: float
    """The largest rho that passes."""
    rho: dict[str, float]
    """For each trial, the distance of its weights from the reference's, relative to how far these have moved."""


def propose(context: StageContext[Equivalence]) -> list[Proposal]:
    """Return the reference split; once it is done the others, and then, in low precision, the last one in float32."""
    splits, _ = _splits(context)
    if not splits:
        return []
    reference = _run(context, splits[0], save_weights=True)
    if not _complete(context.study, reference):
        return [reference]
    compared = {"reference_weights": _weights(context, reference)}
    calibrated = context.stage.tolerance is None and reference.config.precision != "float32"
    others = [_run(context, split, save_weights=calibrated and split == splits[-1], **compared) for split in splits[1:]]
    if not others or not calibrated or not _complete(context.study, others[-1]):
        return [reference, *others]
    return [reference, *others, _control(context, others[-1])]


def _splits(context: StageContext[Equivalence]) -> tuple[list[Split], tuple[str, ...]]:
    """Return (the splits of the effective batch, why others were skipped)."""
    splits: list[Split] = []
    skipped: list[str] = []
    effective = _effective_batch_size(context)
    for size in _wanted(context):
        try:
            splits.append(context.split_of(effective, size))
        except ValueError as error:
            skipped.append(f"skipped: {error}")
    return splits, tuple(skipped)


def _wanted(context: StageContext[Equivalence]) -> list[int]:
    """Return the micro-batch sizes: by default the chosen one and the two largest proper divisors of it."""
    if context.stage.micro_batch_sizes:
        return list(context.stage.micro_batch_sizes)
    chosen = chosen_split(context).micro_batch_size
    divisors = [size for size in range(chosen // 2, 0, -1) if chosen % size == 0]
    return [chosen, *divisors[:2]]


def _effective_batch_size(context: StageContext[Equivalence]) -> int:
    """Return the study file's effective batch, or that of the largest micro-batch in two accumulation steps."""
    return context.stage.effective_batch_size or context.split(max(_wanted(context)), 2).effective_batch_size


def _run(context: StageContext[Equivalence], split: Split, **changes: object) -> Proposal:
    name = f"equivalence-{split}"
    config = context.short_trial(split, chosen_mode(context.study), context.stage.steps, **changes)
    return Proposal(name, "equivalence", config, candidate=name)


def _control(context: StageContext[Equivalence], last: Proposal) -> Proposal:
    changes = {"precision": "float32", "reference_weights": _weights(context, last), "save_weights": False}
    config = TrialConfig.model_validate(last.config.model_dump() | changes)
    name, role = f"{last.id}-float32", "control: what the precision alone makes"
    return Proposal(name, "equivalence", config, candidate=name, role=role, control=True)


def _weights(context: StageContext[Equivalence], proposal: Proposal) -> str:
    return f"{context.run_dir}/trials/{proposal.id}/weights.pt"


def _complete(study: Study, proposal: Proposal) -> bool:
    trial = study.trials.get(proposal.id)
    return trial is not None and trial.state is TrialState.COMPLETE


def conclude(context: StageContext[Equivalence]) -> Conclusion:
    """Conclude that every split's rho is within the tolerance, or fail with the number of the worst."""
    trials = [trial for trial in context.trials() if not trial.proposal.control]
    unfinished = [trial for trial in trials if trial.state is not TrialState.COMPLETE]
    if unfinished:
        worst = unfinished[0]
        reason = f"{worst.id} could not be compared: {worst.explanation}"
        return Conclusion("equivalence", ok=False, reason=reason)
    rho = {trial.id: trial.measured("rho") for trial in trials if "rho" in trial.metrics}
    _, skipped = _splits(context)
    if not rho:
        reason = "nothing to compare: there are no two splits of this batch"
        return Conclusion("equivalence", ok=True, reason=reason, notes=skipped)
    findings = EquivalenceFindings(_tolerance(context, trials[0].config.precision), rho)
    worst = context.study.trials[max(rho, key=lambda name: rho[name])]
    if rho[worst.id] > findings.tolerance:
        return concluded(findings, _failure(worst, rho[worst.id], findings.tolerance), skipped, ok=False)
    same = f"{len(rho) + 1} splits of one effective batch end at the same weights"
    reason = f"{same}: rho <= {rho[worst.id]:.1e} (tolerance {findings.tolerance:.1e})"
    return concluded(findings, reason, skipped)


def _failure(worst: Trial, rho: float, tolerance: float) -> str:
    layers = int(worst.metric("num_batch_norms") or 0)
    cause = (
        f"the model has {layers} BatchNorm layers, whose statistics are those of one micro-batch; "
        "replace them (GroupNorm, LayerNorm)"
        if layers
        else "look for a loss that is a mean instead of a sum, dropout that is not 0, or statistics over the micro-batch"
    )
    return (
        f"the split of the batch changes what is trained: {worst.id} is rho = {rho:.2e} from the reference, "
        f"above {tolerance:.1e}; {cause}, or leave the equivalence stage out if that is meant"
    )


def _tolerance(context: StageContext[Equivalence], precision: str) -> float:
    if context.stage.tolerance is not None:
        return context.stage.tolerance
    if precision == "float32":
        return FLOAT32_TOLERANCE
    controls = [trial for trial in context.trials() if trial.proposal.control and "rho" in trial.metrics]
    return controls[0].measured("rho") if controls else LOW_PRECISION_TOLERANCE


def describe(context: StageContext[Equivalence]) -> list[str]:
    if not context.stage.micro_batch_sizes and context.config.keys_of(Frontier):
        return ["the chosen micro-batch against the two largest sizes that divide it, over one effective batch"]
    return [proposal.id for proposal in propose(context)]


def figures(context: StageContext[Equivalence]) -> list[Figure]:
    """Return every split's rho, one row each; a rho of 0 cannot be shown on a log axis, so the caption names it."""
    measured = [(trial, rho) for trial in context.trials() if (rho := trial.metric("rho")) is not None]
    shown = [(trial, rho) for trial, rho in measured if rho > 0]
    rows = {-float(i): short_name(trial) for i, (trial, _) in enumerate(shown)}
    marks = tuple(Mark(rho, row, number_text(rho)) for row, (_, rho) in zip(rows, shown, strict=True))
    same = [short_name(trial) for trial, rho in measured if rho == 0]
    return [
        Figure(
            Axis("rho, relative distance of the weights", log=True),
            Axis("", lambda row: rows[row], ticks=tuple(rows)),
            (Series("", marks, joined=False),),
            f"Not on the axis, because rho is 0: {', '.join(same)}." if same else "",
            _tolerance_lines(context),
            width=640,
            height=90 + 34 * len(shown),
        )
    ]


def _tolerance_lines(context: StageContext[Equivalence]) -> tuple[Line, ...]:
    findings = found(context.study, EquivalenceFindings)
    if findings is None:
        return ()
    return (Line(findings.tolerance, f"tolerance {number_text(findings.tolerance)}", vertical=True),)


COLUMNS = ("final_loss", "step_seconds", "tokens_per_second", "mfu", "rho")

STAGE = Stage[Equivalence](propose, conclude, describe, figures, COLUMNS)
