"""Is (m x k) really the same as (1 x mk) for this model? Several splits of one effective batch, from the same weights."""

from __future__ import annotations

from orchestrator.config import Equivalence
from orchestrator.stages.setting import Setting
from orchestrator.study import Conclusion, Proposal, Study, Trial, TrialState
from trainers.config import TrialConfig, derive_accumulation

# In float32 the splits differ by the order of summation alone; AdamW makes 1e-5 of it in 20 steps.
FLOAT32_TOLERANCE = 1e-4
# In low precision a split may differ by so many times what a mere reordering of its micro-batches makes.
REORDERINGS = 3.0
# A reordering sums the same rounded gradients, a split rounds others: in bfloat16 that alone makes 9e-3 in 12 steps.
LOW_PRECISION_FLOOR = 2e-2


def propose(stage: Equivalence, setting: Setting, study: Study) -> list[Proposal]:
    """The reference split first; the others, and in low precision a reordered copy of the second, when it is done."""
    splits, _ = _splits(stage, setting, study)
    if not splits:
        return []
    reference = _run(stage, setting, study, splits[0], save_weights=True)
    if not _complete(study, reference):
        return [reference]
    compared = {"reference_weights": _weights(setting, reference)}
    others = [_run(stage, setting, study, size, save_weights=i == 0, **compared) for i, size in enumerate(splits[1:])]
    if not others or not _self_calibrated(stage, others[0].config):
        return [reference, *others]
    if not _complete(study, others[0]):
        return [reference, *others]
    return [reference, *others, _control(others[0], setting)]


def _splits(stage: Equivalence, setting: Setting, study: Study) -> tuple[list[int], tuple[str, ...]]:
    """(micro-batch sizes that divide the effective batch, why others were skipped)."""
    splits: list[int] = []
    skipped: list[str] = []
    effective = _effective(stage, setting, study)
    for size in _wanted(stage, setting, study):
        try:
            derive_accumulation(effective, size, setting.study.world_size)
            splits.append(size)
        except ValueError as error:
            skipped.append(f"skipped: {error}")
    return splits, tuple(skipped)


def _wanted(stage: Equivalence, setting: Setting, study: Study) -> list[int]:
    """By default the chosen micro-batch and the two largest proper divisors of it."""
    if stage.micro_batch_sizes:
        return list(stage.micro_batch_sizes)
    chosen, _ = setting.chosen_batch(study)
    divisors = [size for size in range(chosen // 2, 0, -1) if chosen % size == 0]
    return [chosen, *divisors[:2]]


def _effective(stage: Equivalence, setting: Setting, study: Study) -> int:
    return stage.effective_batch_size or 2 * max(_wanted(stage, setting, study)) * setting.study.world_size


def _run(stage: Equivalence, setting: Setting, study: Study, micro_batch_size: int, **changes: object) -> Proposal:
    effective = _effective(stage, setting, study)
    accumulation = derive_accumulation(effective, micro_batch_size, setting.study.world_size)
    config = setting.short_trial(study, micro_batch_size, accumulation, stage.steps, **changes)
    return Proposal(f"equivalence-m{micro_batch_size}k{accumulation}", "equivalence", config)


def _control(second: Proposal, setting: Setting) -> Proposal:
    changes = {"reverse_micro_batches": True, "reference_weights": _weights(setting, second), "save_weights": False}
    config = TrialConfig.model_validate(second.config.model_dump() | changes)
    return Proposal(second.id + "-reordered", "equivalence", config, role="control: another order of summation")


def _weights(setting: Setting, proposal: Proposal) -> str:
    return f"{setting.run_dir}/trials/{proposal.id}/weights.pt"


def _complete(study: Study, proposal: Proposal) -> bool:
    trial = study.trials.get(proposal.id)
    return trial is not None and trial.state is TrialState.COMPLETE


def _self_calibrated(stage: Equivalence, config: TrialConfig) -> bool:
    return stage.tolerance is None and config.precision != "float32" and config.gradient_accumulation_steps > 1


def conclude(stage: Equivalence, setting: Setting, study: Study) -> Conclusion:
    """Whether every split's rho is within the tolerance; fails the study, with the number, where it is not."""
    trials = study.of_stage("equivalence")
    unfinished = [trial for trial in trials if trial.state is not TrialState.COMPLETE]
    if unfinished:
        worst = unfinished[0]
        return Conclusion("equivalence", False, f"{worst.id} could not be compared: {worst.reason}")
    compared = [t for t in trials if "rho" in t.metrics and not t.config.reverse_micro_batches]
    _, skipped = _splits(stage, setting, study)
    if not compared:
        return Conclusion("equivalence", True, "nothing to compare: there are no two splits of this batch", {}, skipped)
    tolerance = _tolerance(stage, trials)
    worst = max(compared, key=lambda trial: trial.metrics["rho"])
    rho = worst.metrics["rho"]
    values = {"tolerance": tolerance, "rho": {trial.id: trial.metrics["rho"] for trial in compared}}
    if rho <= tolerance:
        reason = f"{len(compared) + 1} splits of one effective batch end at the same weights: rho <= {rho:.1e} (tolerance {tolerance:.1e})"
        return Conclusion("equivalence", True, reason, values, skipped)
    return Conclusion("equivalence", False, _failure(worst, rho, tolerance), values, skipped)


def _failure(worst: Trial, rho: float, tolerance: float) -> str:
    layers = int(worst.metrics.get("num_batch_norms", 0))
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


def _tolerance(stage: Equivalence, trials: list[Trial]) -> float:
    if stage.tolerance is not None:
        return stage.tolerance
    control = [t.metrics["rho"] for t in trials if t.config.reverse_micro_batches]
    if control:
        return max(LOW_PRECISION_FLOOR, REORDERINGS * control[0])
    return FLOAT32_TOLERANCE if trials[0].config.precision == "float32" else LOW_PRECISION_FLOOR
