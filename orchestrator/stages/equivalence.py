"""Is (m x k) really the same as (1 x mk) for this model? Several splits of one effective batch, from the same weights."""

from __future__ import annotations

from orchestrator.config.stages import Equivalence
from orchestrator.stages.context import Setting
from orchestrator.study.state import Conclusion, Proposal, Study, Trial, TrialState
from trainers.config import TrialConfig, derive_accumulation

# In float32 the splits differ by the order of summation alone; AdamW makes 1e-5 of it in 20 steps.
FLOAT32_TOLERANCE = 1e-4
# In low precision two splits may differ by what the precision itself makes of one of them, and what is wrong with a split
# does not widen that. (A GPT of 0.9 M parameters, bfloat16, 5 to 20 steps: 1.5e-2 to 2.7e-2, and 0.3e-2 to 1.1e-2 between
# splits.) This holds where the float32 run does not fit.
LOW_PRECISION_TOLERANCE = 2e-2
CONTROL = "-float32"


def propose(stage: Equivalence, setting: Setting, study: Study) -> list[Proposal]:
    """The reference split first; the others when it is done, and in low precision the last of them in float32."""
    splits, _ = _splits(stage, setting, study)
    if not splits:
        return []
    reference = _run(stage, setting, study, splits[0], save_weights=True)
    if not _complete(study, reference):
        return [reference]
    compared = {"reference_weights": _weights(setting, reference)}
    calibrated = stage.tolerance is None and reference.config.precision != "float32"
    others = [
        _run(stage, setting, study, size, save_weights=calibrated and size == splits[-1], **compared)
        for size in splits[1:]
    ]
    if not others or not calibrated or not _complete(study, others[-1]):
        return [reference, *others]
    return [reference, *others, _control(others[-1], setting)]


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


def _control(last: Proposal, setting: Setting) -> Proposal:
    changes = {"precision": "float32", "reference_weights": _weights(setting, last), "save_weights": False}
    config = TrialConfig.model_validate(last.config.model_dump() | changes)
    return Proposal(last.id + CONTROL, "equivalence", config, role="control: what the precision alone makes")


def _weights(setting: Setting, proposal: Proposal) -> str:
    return f"{setting.run_dir}/trials/{proposal.id}/weights.pt"


def _complete(study: Study, proposal: Proposal) -> bool:
    trial = study.trials.get(proposal.id)
    return trial is not None and trial.state is TrialState.COMPLETE


def conclude(stage: Equivalence, setting: Setting, study: Study) -> Conclusion:
    """Whether every split's rho is within the tolerance; fails the study, with the number, where it is not."""
    trials = [trial for trial in study.of_stage("equivalence") if not trial.id.endswith(CONTROL)]
    controls = [trial for trial in study.of_stage("equivalence") if trial.id.endswith(CONTROL)]
    unfinished = [trial for trial in trials if trial.state is not TrialState.COMPLETE]
    if unfinished:
        worst = unfinished[0]
        return Conclusion("equivalence", False, f"{worst.id} could not be compared: {worst.reason}")
    compared = [trial for trial in trials if "rho" in trial.metrics]
    _, skipped = _splits(stage, setting, study)
    if not compared:
        return Conclusion("equivalence", True, "nothing to compare: there are no two splits of this batch", {}, skipped)
    tolerance = _tolerance(stage, trials[0].config.precision, controls)
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


def _tolerance(stage: Equivalence, precision: str, controls: list[Trial]) -> float:
    if stage.tolerance is not None:
        return stage.tolerance
    if precision == "float32":
        return FLOAT32_TOLERANCE
    return next((trial.metrics["rho"] for trial in controls if "rho" in trial.metrics), LOW_PRECISION_TOLERANCE)
