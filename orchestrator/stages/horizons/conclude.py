"""What runs of several lengths come to at the length of the real run."""

from __future__ import annotations

import math

import numpy as np

from batchscout.orchestrator.config.stages import Horizons, Train
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.observed import setting_of
from batchscout.orchestrator.stages.estimates.ranking import standings
from batchscout.orchestrator.stages.estimates.surface import Surface
from batchscout.orchestrator.stages.findings import concluded
from batchscout.orchestrator.stages.horizons.findings import BatchAtLength, HorizonsFindings
from batchscout.orchestrator.stages.horizons.longer import Carried, Ended, carried, room_for
from batchscout.orchestrator.stages.train import (
    LIKELY,
    Choice,
    choice_of,
    full_runs,
    gain_over,
    interval,
    lineup_of,
    surface_of,
)
from batchscout.orchestrator.study.state import Conclusion
from batchscout.orchestrator.study.trial import TrialState
from batchscout.orchestrator.units import loss_text, number_text, probability_text, share_text

SAFE = 0.9
"""The probability with which a setting must train to be recommended where it need not have been run."""
EVEN = 0.5
"""Where the study has left the user's own setting, at its own length, it is left for the real run, too, if another is better with this probability."""
NUM_LENGTHS = 9
"""At so many lengths, from the study's to the real run's, it is asked which batch is the best."""


def conclude(context: StageContext[Horizons]) -> Conclusion:
    """Conclude with the batch and the learning rate for the real run's length."""
    runs, as_train = ended(context), _as_train(context)
    if not runs:
        reason = "undetermined: no run of another length finished; see the trials' reasons"
        return Conclusion("horizons", ok=True, reason=reason)
    room = room_for(math.log2(length_of(context)), runs[0].octaves)
    own_length = surface_of(as_train, lineup_of(as_train), room)
    assert own_length, "runs of other lengths are those of one that completed"
    findings = _findings(context, carried(own_length, runs), choice_of(as_train, own_length))
    return concluded(findings, _sentence(context, findings))


def ended(context: StageContext[Horizons]) -> list[Ended]:
    """Return what the stage's runs ended at, the shortest first."""
    candidates = lineup_of(_as_train(context)).candidates
    whole = {one.split.effective_batch_size: one.sample_budget for one in candidates}
    found = []
    for one in standings(context.trials()):
        config = one.config
        if config.effective_batch_size not in whole:
            continue  # of an earlier format, whose batches were chosen otherwise
        octaves = math.log2(config.sample_budget / whole[config.effective_batch_size])
        found.append(Ended(setting_of(one.first), octaves, one.val_loss, len(one.trials)))
    return sorted(found, key=lambda one: one.octaves)


def length_of(context: StageContext[Horizons]) -> float:
    """Return the real run's length, as a share of the study's own."""
    assert context.config.real_run, "a study with this stage has a real run"
    return context.config.real_run.samples / context.config.sample_budget


def _as_train(context: StageContext[Horizons]) -> StageContext[Train]:
    train = context.of(Train)
    assert train, "a study with this stage has train"
    return train


def _findings(context: StageContext[Horizons], law: Carried, choice: Choice) -> HorizonsFindings:
    assert context.config.real_run, "a study with this stage has a real run"
    as_train = _as_train(context)
    surface = law.at(math.log2(length_of(context)))
    best, own = surface.best_setting(SAFE), choice.own
    gain = gain_over(as_train, surface, best, own) if own else None
    if own and gain and (choice.overfitting or gain.p_better < (LIKELY if choice.is_own else EVEN)):
        best, gain = setting_of(own.first), None
    batch = best.effective_batch_size
    candidate = next(one for one in lineup_of(as_train).candidates if one.split.effective_batch_size == batch)
    done = [one.config.split for one in full_runs(context.study) if one.state is TrialState.COMPLETE]
    trained = (one for one in done if one.effective_batch_size == batch)
    # A larger micro-batch may have filled the memory.
    split = min(trained, key=lambda one: one.micro_batch_size, default=candidate.split)
    low, _, high = interval(surface.coordinates.rule[batch] * 2 ** surface.best_u(batch))
    ends = interval(surface.at(best))
    return HorizonsFindings(
        context.config.real_run.samples,
        batch,
        learning_rate=best.learning_rate,
        learning_rate_low=low,
        learning_rate_high=high,
        batches=tuple(_at_length(surface, batch) for batch in surface.coordinates.batches),
        val_loss=ends[1],
        val_loss_low=ends[0],
        val_loss_high=ends[2],
        crossing_samples=_crossing(context, law, choice.setting.effective_batch_size, batch),
        regret_time=surface.regret(best),
        time=gain,
        micro_batch_size=split.micro_batch_size,
        gradient_accumulation_steps=split.gradient_accumulation_steps,
        mode=candidate.mode,
        sample_budget=round(length_of(context) * candidate.sample_budget / batch) * batch,
        keeps_own=own is not None and gain is None,
    )


def _at_length(surface: Surface, batch: int) -> BatchAtLength:
    low, middle, high = interval(surface.best_loss(batch))
    return BatchAtLength(batch, middle, low, high, surface.p_best[batch])


def _crossing(context: StageContext[Horizons], law: Carried, now: int, then: int) -> float | None:
    """Return the length from which on the real run's batch is likelier the best than the study's."""
    if now == then:
        return None
    for length in np.geomspace(1.0, length_of(context), NUM_LENGTHS)[1:]:
        p_best = law.at(math.log2(length)).p_best
        if p_best[then] >= p_best[now]:
            return float(length) * context.config.sample_budget
    return None


def _sentence(context: StageContext[Horizons], findings: HorizonsFindings) -> str:
    mine = next(one for one in findings.batches if one.effective_batch_size == findings.effective_batch_size)
    rate = f"learning rate {findings.learning_rate:.2g} [{findings.learning_rate_low:.2g}, {findings.learning_rate_high:.2g}]"
    ends = (findings.val_loss, findings.val_loss_low, findings.val_loss_high)
    middle, low, high = map(loss_text, ends)
    loss = f"about {middle} [{low}, {high}]"
    told = (
        f"for {number_text(findings.samples)} samples ({number_text(length_of(context))} x this study's): effective batch "
        f"{findings.effective_batch_size} at {rate}, val loss {loss}, wasting {share_text(findings.regret_time)} of the {'samples' if context.config.objective == 'samples' else 'training time'} on average "
        "against the best setting"
    )
    sure = f"; the best batch with probability {probability_text(mine.p_best)}" if len(findings.batches) > 1 else ""
    crossing = findings.crossing_samples
    return f"{told}{sure}" + (f", from about {number_text(crossing)} samples on" if crossing else "")
