"""What does accumulation cost, what does it buy? Effective batches in multiples of the chosen micro-batch."""

from __future__ import annotations

import math

from orchestrator.config.stages import Throughput
from orchestrator.stages.context import Setting
from orchestrator.stages.ranking import NoiseScale, best_noise_scale, goodput
from orchestrator.study.state import Conclusion, Proposal, Study, Trial, TrialState

# Past so many times the noise scale a larger batch saves almost no step: steps already do 2/3 of what they ever could.
ENOUGH_NOISE_SCALES = 2.0


def propose(stage: Throughput, setting: Setting, study: Study) -> list[Proposal]:
    """One multiple after the other, until the gradient signal no longer gains from a larger batch."""
    micro_batch_size, base = setting.chosen_batch(study)
    proposals: list[Proposal] = []
    for multiple in sorted(stage.multiples):
        accumulation = multiple * base
        if micro_batch_size * accumulation * setting.study.world_size > study.facts.get("num_train_samples", math.inf):
            break
        config = setting.short_trial(study, micro_batch_size, accumulation, stage.steps)
        proposals.append(Proposal(f"throughput-m{micro_batch_size}k{accumulation}", "throughput", config))
        trial = study.trials.get(proposals[-1].id)
        if trial is None or not trial.state.ended or _saturated(study.of_stage("throughput")):
            break
    return proposals


def _saturated(trials: list[Trial]) -> bool:
    """Whether the largest batch so far is past what the noise scale, at its upper end, can use."""
    scale = best_noise_scale(trials)
    largest = max(trial.config.effective_batch_size for trial in trials)
    return scale is not None and scale.high is not None and largest > ENOUGH_NOISE_SCALES * scale.high


def conclude(stage: Throughput, setting: Setting, study: Study) -> Conclusion:
    """The fastest batch, the noise scale, and the batch with the best goodput where the noise scale is known."""
    done = [t for t in study.of_stage("throughput") if t.state is TrialState.COMPLETE]
    if not done:
        return Conclusion("throughput", False, "no effective batch could be measured; see the reasons of its trials")
    scale = best_noise_scale(done)
    rates = {t.config.effective_batch_size: t for t in done}
    fastest = max(done, key=_rate)
    known = scale.point if scale else None
    gains = {batch: goodput(_rate(t), batch, known) for batch, t in rates.items()} if known else {}
    best = rates[max(gains, key=lambda batch: gains[batch])] if gains else fastest
    return Conclusion(
        "throughput",
        True,
        f"effective batch {fastest.config.effective_batch_size} gives the most tokens/s ({_rate(fastest):,.0f}); "
        + _say_scale(scale, best),
        {
            "critical_batch_size": known,
            "critical_batch_size_low": scale.low if scale else None,
            "critical_batch_size_high": scale.high if scale else None,
            "goodput": {str(batch): gain / max(gains.values()) for batch, gain in gains.items()},
            "best_tokens_per_second": _batch(fastest),
            "best_goodput": _batch(best),
        },
        _notes(stage, setting, study, done, scale),
    )


def _say_scale(scale: NoiseScale | None, best: Trial) -> str:
    if scale is None or scale.point is None:
        return "the noise scale is undetermined, so goodput is not ranked"
    return f"the noise scale is {scale} samples, so effective batch {best.config.effective_batch_size} has the best goodput of these"


def _notes(
    stage: Throughput, setting: Setting, study: Study, done: list[Trial], scale: NoiseScale | None
) -> tuple[str, ...]:
    notes = ["the noise scale is that of early training; it grows as the loss falls (see the train stage's trials)"]
    tried = {trial.config.gradient_accumulation_steps for trial in done}
    left_out = [m for m in stage.multiples if m * setting.chosen_batch(study)[1] not in tried]
    if left_out and _saturated(done):
        largest = max(trial.config.effective_batch_size for trial in done)
        notes.append(
            f"multiples {', '.join(map(str, left_out))} were left out: effective batch {largest} is already past "
            f"{ENOUGH_NOISE_SCALES:g} x the noise scale {scale}"
        )
    elif left_out:
        notes.append(
            f"multiples {', '.join(map(str, left_out))} were left out: the data has fewer samples than such a batch"
        )
    single = [t for t in done if t.config.gradient_accumulation_steps * t.config.world_size == 1]
    if single:
        batch = single[0].config.effective_batch_size
        notes.append(f"effective batch {batch} is one micro-batch, so its noise scale is not available: that takes two")
    below = [t for t in done if t.metrics.get("coherence", 1) <= t.metrics.get("coherence_floor", 0)]
    if below:
        batches = ", ".join(str(t.config.effective_batch_size) for t in below)
        notes.append(f"at effective batch {batches} the coherence is not above its noise floor")
    return tuple(notes)


def _batch(trial: Trial) -> dict[str, int]:
    return {
        "micro_batch_size": trial.config.micro_batch_size,
        "gradient_accumulation_steps": trial.config.gradient_accumulation_steps,
    }


def _rate(trial: Trial) -> float:
    return trial.metrics.get("tokens_per_second", 0.0)
