"""The sentence on top: what to train with, what it wins at equal cost, how sure that is, and what it holds for."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.config.keys import StudyConfig
from orchestrator.stages.findings import found
from orchestrator.stages.learning_rate import LearningRateFindings
from orchestrator.stages.train import ENOUGH, BatchFindings, TrainFindings
from orchestrator.study.state import Study
from orchestrator.study.trial import Trial, TrialState
from orchestrator.units import number_text, seconds_text


@dataclass(frozen=True)
class Scope:
    """What a recommendation was measured on: it holds there, and is a guess elsewhere."""

    seeds: int
    validation_samples: int
    sample_budget: int
    """Of the recommended run."""
    effective_batch_sizes: tuple[int, ...]
    """Those of which full runs completed."""
    largest_accumulation: int
    """The most accumulation steps of any full run."""

    def __str__(self) -> str:
        batches = self.effective_batch_sizes
        tried = (
            f"effective batch {batches[0]}" if len(batches) == 1 else f"effective batches {batches[0]} to {batches[-1]}"
        )
        accumulated = (
            "no accumulation was tried"
            if self.largest_accumulation == 1
            else f"accumulation up to {self.largest_accumulation}"
        )
        return (
            f"{'one seed' if self.seeds == 1 else f'{self.seeds} seeds'}, {number_text(self.validation_samples)} validation "
            f"samples, {number_text(self.sample_budget)} training samples, {tried}, {accumulated}"
        )


def scope_of(config: StudyConfig, study: Study, winner: Trial) -> Scope:
    full = [t for t in study.trials.values() if t.config.evaluations and t.state is TrialState.COMPLETE]
    return Scope(
        len(config.seeds),
        config.evaluation_samples,
        winner.config.sample_budget,
        tuple(sorted({t.config.effective_batch_size for t in full})),
        max(t.config.gradient_accumulation_steps for t in full),
    )


def p_best(study: Study, winner: Trial) -> float | None:
    """Return the probability that no batch is better than the recommended one by more than the seeds' deviation."""
    mine = _batch(study, winner)
    return mine.p_best if mine else None


def undecided_between(study: Study, winner: Trial) -> tuple[int, ...]:
    """Return the effective batches between which the study could not decide; none where it did."""
    findings, mine = found(study, TrainFindings), _batch(study, winner)
    if findings is None or mine is None or mine.p_best >= ENOUGH:
        return ()
    rivals = [one for one in findings.batches if one is not mine and one.p_best > 1 - ENOUGH]
    return tuple(sorted(one.effective_batch_size for one in (mine, *rivals)))


def would_decide(config: StudyConfig, study: Study, winner: Trial) -> str | None:
    """Return what would decide a study that could not; None where it did."""
    findings, mine = found(study, TrainFindings), _batch(study, winner)
    if findings is None or mine is None or mine.p_best >= ENOUGH:
        return None
    runs = max(1, round(mine.num_runs_to_decide))
    seconds = findings.seconds or winner.metric("train_seconds") or 0.0
    hours = runs * seconds * config.world_size / 3600
    return (
        f"about {runs} more runs of {seconds_text(seconds)} each, {hours:.2g} device-hours: raise stages.train.max_runs"
    )


def verdict(config: StudyConfig, study: Study, winner: Trial, mode: str) -> str:
    """mode: the activation checkpointing, in words."""
    trial = winner.config
    what = (
        f"Train with micro-batch {trial.micro_batch_size}, {_times(trial.gradient_accumulation_steps)}"
        f"(effective batch {trial.effective_batch_size}), activation checkpointing {mode} "
        f"and learning rate {trial.learning_rate:.3g}"
    )
    edge = " The learning rate is the last one tried on its side: a further one may be better."
    return f"{what}: {_why(config, study, winner)}.{edge if _is_on_edge(study, winner) else ''}"


def _times(accumulation: int) -> str:
    return "no accumulation " if accumulation == 1 else f"{accumulation} accumulation steps "


def _is_on_edge(study: Study, winner: Trial) -> bool:
    findings = found(study, LearningRateFindings)
    return findings is not None and findings.on_edge and winner.stage == findings.STAGE


def _why(config: StudyConfig, study: Study, winner: Trial) -> str:
    findings, mine = found(study, TrainFindings), _batch(study, winner)
    loss = winner.measured("val_loss")
    baseline = next((t for t in study.trials.values() if t.protected and t.state is TrialState.COMPLETE), None)
    if baseline is None:
        return f"it ends at val loss {loss:.3f}, the best of what was run"
    before = f"the baseline's {baseline.measured('val_loss'):.3f}"
    cost = _cost(findings)
    if winner.config.effective_batch_size == baseline.config.effective_batch_size:
        at_its_rate = "" if winner.id == baseline.id else f"; this learning rate brings it from {before} to {loss:.3f}"
        return f"{_baseline_stays(findings, mine)}{at_its_rate}{_sure(study, winner, mine)}"
    other = f" (effective batch {baseline.config.effective_batch_size})"
    return f"val loss {loss:.3f} against {before}{other} after {cost}{_sure(study, winner, mine)}"


def _cost(findings: TrainFindings | None) -> str:
    if findings is None or findings.seconds is None:
        return "the same samples"
    return f"the same training time ({seconds_text(findings.seconds)})"


def _baseline_stays(findings: TrainFindings | None, mine: BatchFindings | None) -> str:
    if findings is None or mine is None:
        return "no batch that was tried beat the baseline's, so the batch is not your bottleneck"
    if mine.p_best < ENOUGH:
        return "the baseline's batch is as good as any that was tried"
    others = [one for one in findings.batches if one is not mine]
    if not others:
        return "it is the only batch that was tried"
    gain = max(0.0, mine.score - min(one.score_low for one in others))
    return (
        f"no other batch gains more than {gain:.3f} over the baseline's after {_cost(findings)} (95 %), so the batch is not "
        "your bottleneck"
    )


def _sure(study: Study, winner: Trial, mine: BatchFindings | None) -> str:
    if mine is None:
        return ""
    between = undecided_between(study, winner)
    if between:
        return (
            f"; undetermined between effective batches {_listed(between)} (this one with probability {mine.p_best:.2f})"
        )
    return f"; the right batch with probability {mine.p_best:.2f}"


def _listed(batches: tuple[int, ...]) -> str:
    return str(batches[0]) if len(batches) == 1 else f"{', '.join(map(str, batches[:-1]))} and {batches[-1]}"


def _batch(study: Study, winner: Trial) -> BatchFindings | None:
    """Return what the train stage found of the recommended batch; None where it did not run, or was of version 0.2."""
    findings = found(study, TrainFindings)
    batches = findings.batches if findings else ()
    return next((one for one in batches if one.effective_batch_size == winner.config.effective_batch_size), None)
