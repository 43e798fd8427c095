"""What is known of the recommended setting: facts for the verdict and the recommendation, which put them into words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import CHANGING
from batchscout.orchestrator.stages import change_of, stage_of
from batchscout.orchestrator.stages.estimates.generalisation import Overfitting
from batchscout.orchestrator.stages.estimates.ranking import Standing, is_first_seen_past, standings
from batchscout.orchestrator.stages.horizons import carried_to
from batchscout.orchestrator.stages.train import BatchFindings, TimeGain, TrainFindings, trained
from batchscout.orchestrator.study.state import Conclusion, Study
from batchscout.orchestrator.study.trial import Trial, TrialState


@dataclass(frozen=True)
class Known:
    """What is known of the recommended setting, for runs as long as the one that it is recommended for."""

    p_best: Mapping[int, float]
    """Of every effective batch that was compared, its own first, the probability that it is the best at its best rate."""
    rates: tuple[float, float]
    """Between what the best learning rate of its batch lies, with probability 0.9."""
    is_decided: bool
    regret_time: float
    """The share of the training time that it wastes on average, against the best setting."""
    time: TimeGain | None = None
    """What it saves of the training time of the user's own; None where it is that one."""
    keeps_own: bool = False
    overfitting: Overfitting | None = None
    """Where the user's own setting, which it is then, began to overfit long before the end of the study's runs."""

    def is_open(self, useful_gain: float) -> bool:
        """True where another setting may be better by more than a useful gain. The user's own setting may be neither open nor decided."""
        return self.regret_time > useful_gain or self.overfitting is not None


def known_of(config: StudyConfig, study: Study, winner: Trial) -> Known | None:
    """Return what is known of the setting: of the real run's, where there is one; None where nothing was compared."""
    real, findings = carried_to(study, winner), trained(study)
    overfitting = findings.overfitting if findings else None
    if real is not None:
        batches = sorted(real.batches, key=lambda one: one.effective_batch_size != real.effective_batch_size)
        return Known(
            {one.effective_batch_size: one.p_best for one in batches},
            (real.learning_rate_low, real.learning_rate_high),
            not real.keeps_own and real.regret_time <= config.useful_gain,
            real.regret_time,
            real.time,
            real.keeps_own,
            overfitting,
        )
    compared = compared_of(study, winner)
    if compared is None:
        return None
    findings, mine = compared.findings, compared.mine
    assert findings.regret_time is not None, "they were compared"
    return Known(
        {one.effective_batch_size: one.p_best for one in (mine, *compared.others)},
        (mine.learning_rate_low, mine.learning_rate_high),
        findings.is_decided(config.useful_gain),
        findings.regret_time,
        findings.time,
        findings.keeps_own,
        overfitting,
    )


LIKELY_ENOUGH = 0.1
"""A batch that is the best with less probability is not named among those that may be."""


def undecided_between(config: StudyConfig, known: Known | None) -> tuple[int, ...]:
    """Return the effective batches of which the best is one, as far as the study could tell; none where it could, or where the learning
    rate alone is open."""
    if known is None or known.overfitting or not known.is_open(config.useful_gain):
        return ()
    mine, *others = known.p_best
    rivals = [batch for batch in others if known.p_best[batch] >= LIKELY_ENOUGH]
    return tuple(sorted((mine, *rivals))) if rivals else ()


@dataclass(frozen=True)
class Compared:
    """What the full runs say of the recommended batch and of those that it was compared with."""

    findings: TrainFindings
    mine: BatchFindings
    others: tuple[BatchFindings, ...]


def compared_of(study: Study, winner: Trial) -> Compared | None:
    """Return the comparison; None without one: no train stage, a single run, or nothing known of what the choice wastes."""
    findings = trained(study)
    mine = findings.of_batch(winner.config.effective_batch_size) if findings else None
    if findings is None or findings.regret_time is None or mine is None:
        return None
    if sum(one.num_runs for one in findings.batches) < 2:
        return None
    return Compared(findings, mine, tuple(one for one in findings.batches if one is not mine))


def failed_stage(study: Study) -> Conclusion | None:
    """Return what the stage that ended the study before its other stages came to; None where none has."""
    return next((conclusion for conclusion in study.conclusions.values() if not conclusion.ok), None)


def standing_of(study: Study, trial: Trial, target_loss: float | None) -> Standing:
    """Return how a completed trial and its other seeds ended."""
    return next(iter(standings(study.seeds_of(trial), target_loss) or standings([trial], target_loss)))


def chosen_of(config: StudyConfig, study: Study, winner: Trial) -> Trial:
    """Return the run that batch and rate were chosen by: the winner, or the one that it is a change of."""
    change = change_of(config, study, winner)
    return study.trials[change.source] if change else winner


def chosen_from(config: StudyConfig, study: Study) -> list[Trial]:
    """Return the full runs that one was chosen from, whatever has become of them: not those that change one thing of it, nor those by which
    a stage measures something else."""
    stages = {one.type for one in config.stages if stage_of(one).trains_candidates and not isinstance(one, CHANGING)}
    return [trial for trial in study.trials.values() if trial.stage in stages]


def is_projected(config: StudyConfig, study: Study, winner: Trial) -> bool:
    """True where no setting that was compared reached target_loss with all of its seeds: the times that decided are then projections."""
    chosen, target = chosen_of(config, study, winner), config.target_loss
    return target is not None and not standing_of(study, chosen, target).reached


def is_too_easy(config: StudyConfig, study: Study, winner: Trial) -> bool:
    """True where the first evaluation of the chosen run, or of the user's own, is at target_loss already: which of them came there sooner is not
    known."""
    target, compared = config.target_loss, (chosen_of(config, study, winner), baseline_run(study))
    return target is not None and any(one and is_first_seen_past(study.seeds_of(one), target) for one in compared)


def baseline_run(study: Study) -> Trial | None:
    """Return the baseline's run, of several seeds the first; None where one of them has not completed."""
    protected = (trial for trial in study.trials.values() if trial.protected)
    return next((trial for trial in protected if not _incomplete(study.seeds_of(trial))), None)


def last_baseline(study: Study) -> Trial | None:
    """Return the baseline's run, or else the last one that was to be it and did not complete, whatever has become of that."""
    protected = [trial for trial in study.trials.values() if trial.protected]
    return baseline_run(study) or next(reversed(_incomplete(protected)), None)


def _incomplete(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.state is not TrialState.COMPLETE]
