"""The sentence on top: what to train with, what it wins at equal cost, how sure that is, and what it holds for."""

from __future__ import annotations

import math
import statistics

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.mode import mode_of
from batchscout.orchestrator.output.caveats import (
    RATE_ON_EDGE,
    asks_for_the_length,
    at_an_end,
    is_on_edge,
    warnings_of,
    worth_a_longer_run,
)
from batchscout.orchestrator.output.deciding import to_decide
from batchscout.orchestrator.output.known import (
    Known,
    baseline_run,
    chosen_from,
    chosen_of,
    known_of,
    last_baseline,
    standing_of,
    undecided_between,
)
from batchscout.orchestrator.output.published import published_pick
from batchscout.orchestrator.output.scope import scope_of
from batchscout.orchestrator.stages import change_of
from batchscout.orchestrator.stages.cost import pays_from
from batchscout.orchestrator.stages.estimates.generalisation import Overfitting
from batchscout.orchestrator.stages.estimates.ranking import Standing, standings, tied_with_best
from batchscout.orchestrator.stages.findings import found
from batchscout.orchestrator.stages.horizons import HorizonsFindings, carried_to, nearest_run
from batchscout.orchestrator.stages.stage import Change
from batchscout.orchestrator.stages.throughput import ThroughputFindings
from batchscout.orchestrator.stages.too_short import in_words
from batchscout.orchestrator.stages.train import TimeGain, TrainFindings, whose
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial
from batchscout.orchestrator.units import (
    listed,
    loss_text,
    number_text,
    probability_text,
    share_text,
    training_time_text,
)
from batchscout.trainers.config import TrialConfig


def verdict(config: StudyConfig, study: Study, winner: Trial, trial: TrialConfig) -> str:
    """Return the sentence on top. trial: the run that is recommended, which is the winner's or, carried to its length, the real run's."""
    said = [f"Train with {settings_text(config, study, winner, trial)}: {_why(config, study, winner)}"]
    if is_on_edge(config, study, winner):
        said.append(RATE_ON_EDGE[0].upper() + RATE_ON_EDGE[1:])
    if end := at_an_end(config, study, winner):
        said.append(f"It is the {end}")
    if deciding := to_decide(config, study, winner):
        said.append(f"To decide it: {deciding.words}")
    if short := worth_a_longer_run(config, study):
        said.append(f"The study's runs are too short for {in_words(short)}")
    warnings = warnings_of(config, study, nearest_run(study, winner, trial), trial)
    said += [f"Warning: {warning}" for warning in warnings]
    return f"{'. '.join(said)}. {_holds_for(config, study, winner)}"


def settings_text(config: StudyConfig, study: Study, winner: Trial, trial: TrialConfig) -> str:
    """Return what to train with."""
    in_tokens = _in_tokens(winner) if trial.split == winner.config.split else ""
    change = change_of(config, study, winner)
    changed = change.in_words(trial) if change else ""
    return (
        f"{_micro_batch(study, trial)}, {_times(trial)} "
        f"(effective batch {trial.effective_batch_size}{in_tokens}), activation checkpointing {mode_of(trial).in_words()} "
        f"and learning rate {trial.learning_rate:.3g}{_growing(trial)}{f', and {changed}' if changed else ''}"
    )


def _holds_for(config: StudyConfig, study: Study, winner: Trial) -> str:
    longer = " For a longer run, give real_run.samples." if asks_for_the_length(config, study, winner) else ""
    published = published_pick(config, study.facts, winner)
    beside = f" For comparison, {published}." if published else ""
    pays = _pays_from(config, study, known_of(config, study, winner))
    return f"Measured with {scope_of(config, study, winner)}.{pays}{longer}{_of_the_host(study)}{beside}"


def _pays_from(config: StudyConfig, study: Study, known: Known | None) -> str:
    """Return what the study cost, and the length of the run from which on it saves more than that; nothing where no time is saved."""
    time = known.time if known else None
    if time is None or time.share >= 1 or config.objective == "samples" or not study.lane_seconds:
        return ""
    pays = training_time_text(pays_from(study.lane_seconds, time.share))
    return f" The study took {training_time_text(study.lane_seconds)} of lane time in all, and pays off for runs of {pays} or more."


def micro_batch_tokens(study: Study, trial: TrialConfig) -> int | None:
    """Return the most tokens of a micro-batch on one rank; None where it has a number of samples."""
    longest = study.facts.longest_sample
    return None if trial.micro_batch is None or longest is None else trial.micro_batch_size * longest


def _micro_batch(study: Study, trial: TrialConfig) -> str:
    size, tokens = trial.micro_batch_size, micro_batch_tokens(study, trial)
    if tokens is None:
        return f"micro-batch {size}"
    of_longest = "the longest sample has" if size == 1 else f"{size} of the longest samples have"
    return f"micro-batches of at most {tokens:,} tokens (as many as {of_longest})"


def _in_tokens(winner: Trial) -> str:
    """Return how many tokens and micro-batches a step had, where it was cut by tokens."""
    tokens, count, padding = (
        winner.metric(name) for name in ("tokens_per_step", "micro_batches_per_step", "padding_share")
    )
    if tokens is None or count is None or padding is None:
        return ""
    ranks = "" if winner.config.world_size == 1 else " over all ranks"
    return f"; a step had {tokens:,.0f} tokens on average, in {count:.1f} micro-batches{ranks} of which {padding:.0%} is padding"


def _times(trial: TrialConfig) -> str:
    accumulation, at_most = trial.gradient_accumulation_steps, "at most " if trial.micro_batch else ""
    ranks = "" if trial.world_size == 1 else f", on each of {trial.world_size} ranks"
    return "no accumulation" + ranks if accumulation == 1 else f"{at_most}{accumulation} accumulation steps{ranks}"


MOST_PHASES_TOLD = 4


def _growing(trial: TrialConfig) -> str:
    """Return where the batch of a ramp grows to what; nothing where it stays."""
    if not trial.ramp:
        return ""
    told = [
        f"{trial.split_in(phase).effective_batch_size} after {phase.from_samples:,} samples (learning rate "
        f"{phase.learning_rate:.3g})"
        for phase in trial.ramp
    ]
    if len(told) > MOST_PHASES_TOLD:
        return f", and let the effective batch grow in {len(told)} steps, from {told[0]} to {told[-1]}"
    return f", and let the effective batch grow: {', '.join(told)}"


def _why(config: StudyConfig, study: Study, winner: Trial) -> str:
    """Return what it wins against the baseline, and how sure that is; first, what it wins against the run that one thing of it was changed
    of."""
    if real := carried_to(study, winner):
        return _for_the_real_run(config, study, winner, real)
    if change := change_of(config, study, winner):
        told = _against_source(config, study, winner, change)
        return f"{told}; for that one, {_why(config, study, study.trials[change.source])}"
    ours, target = standing_of(study, winner, config.target_loss), config.target_loss
    baseline, known = baseline_run(study), known_of(config, study, winner)
    if baseline is None:
        sure = _sure(config, known) if known else ""
        place = place_text(config, study, winner)
        return f"it {_ending(ours, target)}, {place}{_how_the_baseline_ended(config, study)}{sure}"
    theirs = standing_of(study, baseline, target)
    if known is not None:
        return _against_own(config, study, baseline, known, ours, theirs)
    if winner.config.effective_batch_size == baseline.config.effective_batch_size:
        its_rate = "" if winner.candidate == baseline.candidate else f"; {_at_its_rate(ours, theirs, target)}"
        findings = found(study, TrainFindings)
        is_alone = findings is not None and len(findings.batches) == 1
        alone = "it is the only batch that was tried" if is_alone else "no batch that was tried is better than yours"
        return f"{alone}{its_rate}"
    return _against(config, study, ours, theirs)


def place_text(config: StudyConfig, study: Study, winner: Trial) -> str:
    """Return how the chosen run stands among all that ended. It need not be the best of them: of those that seeds alone may order the
    smallest batch is chosen, or a rate near the best of all, and by the surface what wastes least."""
    chosen, target = chosen_of(config, study, winner), config.target_loss
    ranking = standings(chosen_from(config, study), target)
    if len(ranking) == 1:
        return "the only run that ended"
    best, of_all = ranking[0], f"the best of {len(ranking)} runs"
    if best.name == chosen.candidate:
        return of_all
    is_tied = any(one.name == chosen.candidate for one in tied_with_best(ranking))
    return f"{'tied with' if is_tied else 'behind'} {of_all}, which {_ending(best, target)}"


def _for_the_real_run(config: StudyConfig, study: Study, winner: Trial, real: HorizonsFindings) -> str:
    """Return what the setting saves in the real run, how sure that is, and which of the study's own runs it is carried on from."""
    known, baseline = known_of(config, study, winner), baseline_run(study)
    assert known, "it was carried to that length"
    length = f"for the real run of {number_text(real.samples)} samples, {number_text(real.samples / config.sample_budget)} x this study's, "
    if known.overfitting:
        saved = f"{whose(config, study, baseline)} stays; it ends at"
    elif known.keeps_own:
        saved = f"{whose(config, study, baseline)} stays: none of the others is shown to save {useful_text(config)} of {_the_cost(config)}; it ends at"
    elif known.time and baseline:
        saved = f"it reaches {_share_text(config, known.time)}{_parts_text(known.time, real.effective_batch_size, baseline)}; it ends at"
    else:
        saved = "it ends at"
    ours = standing_of(study, winner, None)
    against = _how_the_baseline_ended(config, study) if baseline is None else ""
    if baseline and baseline is not winner:
        against = (
            f" against {loss_text(standing_of(study, baseline, None).val_loss)} with {whose(config, study, baseline)}"
        )
    own, ends = winner.config, (real.val_loss, real.val_loss_low, real.val_loss_high)
    middle, low, high = map(loss_text, ends)
    return (
        f"{length}{saved} about {middle} ({low} to {high}){_sure(config, known)}. It is carried on "
        f"from runs of this study's length and shorter ones, of which effective batch {own.effective_batch_size} at learning rate "
        f"{own.learning_rate:.3g} was chosen at this study's: val loss {loss_text(ours.val_loss)}{against}"
    )


def _against_own(
    config: StudyConfig, study: Study, baseline: Trial, known: Known, ours: Standing, theirs: Standing
) -> str:
    """Return what the setting saves against the user's own, as people budget it, and how sure that is."""
    if known.overfitting:
        return f"{whose(config, study, baseline)} stays; it {_ending(ours, config.target_loss)}{_sure(config, known)}"
    if known.keeps_own:
        is_good = known.regret_time <= config.useful_gain and len(known.p_best) > 1
        so = ", so the batch is not your bottleneck" if is_good else ""
        return (
            f"{whose(config, study, baseline)} stays: none of the others is shown to save {useful_text(config)} of {_the_cost(config)}{so}; it "
            f"{_ending(ours, config.target_loss)}{_sure(config, known)}"
        )
    saved, batch = "", ours.config.effective_batch_size
    if known.time:
        saved = f"; it reaches {_share_text(config, known.time)}{_parts_text(known.time, batch, baseline)}"
    return f"{_against(config, study, ours, theirs)}{saved}{_sure(config, known)}"


def saved_text(config: StudyConfig, study: Study, winner: Trial) -> str:
    """Return what the recommended setting saves, in a line."""
    known, baseline, real = known_of(config, study, winner), baseline_run(study), carried_to(study, winner)
    if change := change_of(config, study, winner):
        told = _against_source(config, study, winner, change)
        return f"{told}; of that one: {saved_text(config, study, study.trials[change.source])}"
    if known and known.overfitting:
        return f"not known: {whose(config, study, baseline)} overfits"
    if known and known.time and baseline:
        batch = real.effective_batch_size if real else winner.config.effective_batch_size
        of_what = f"of a run of {number_text(real.samples)} samples with" if real else "of"
        return f"{_share_text(config, known.time)} {of_what} {_own_text(config, study, baseline)}{_parts_text(known.time, batch, baseline)}"
    if (known and known.keeps_own) or (baseline and baseline.candidate == winner.candidate):
        return f"nothing: it is {whose(config, study, baseline)}"
    ours = standing_of(study, winner, config.target_loss)
    if baseline is None:
        return f"not known: it {_ending(ours, config.target_loss)}{_how_the_baseline_ended(config, study)}"
    return (
        f"not known in training time: {_against(config, study, ours, standing_of(study, baseline, config.target_loss))}"
    )


def _share_text(config: StudyConfig, time: TimeGain) -> str:
    share, low, high = map(share_text, (time.share, time.low, time.high))
    return f"the same loss in {share} of {_the_cost(config)} ({low} to {high} with probability 0.9)"


def _parts_text(time: TimeGain, batch: int, own: Trial) -> str:
    if batch == own.config.effective_batch_size:
        return ", by the learning rate alone"
    by_speed = "" if time.by_speed is None else f" x {share_text(time.by_speed)} by its {_side(time.by_speed)}samples/s"
    return f" = {share_text(time.by_rate)} by the learning rate x {share_text(time.by_batch)} by the batch{by_speed}"


def _side(by_speed: float) -> str:
    """Return which of the two is faster, and nothing where the figure that is shown beside it says neither."""
    return "" if share_text(by_speed) == "100%" else "higher " if by_speed < 1 else "lower "


def _the_cost(config: StudyConfig) -> str:
    return "the samples" if config.objective == "samples" else "the training time"


def _against_source(config: StudyConfig, study: Study, winner: Trial, change: Change) -> str:
    """Return what the one thing that was changed wins. A ramp was judged as the study judges its runs, a setting by the loss after as many
    samples."""
    judged, target = (config.objective, config.target_loss) if winner.config.ramp else ("samples", None)
    source = study.trials[change.source]
    ours, theirs = (standing_of(study, trial, target) for trial in (winner, source))
    its_own = "a batch that stays" if winner.config.ramp else change.in_words(source.config)
    same = f"without {change.in_words(winner.config)}" if change.model else f"with {its_own}"
    cost = {"time": " after the same training time", "samples": " after the same samples", "target": ""}[judged]
    return f"it {_ending(ours, target)}, the same run {same} {_ending(theirs, target)}{cost}; the difference is more than seeds vary"


def _against(config: StudyConfig, study: Study, ours: Standing, theirs: Standing) -> str:
    """Return what the two came to, and after what."""
    own, target = _own_text(config, study, theirs.first), config.target_loss
    if target is not None:
        return f"it {_ending(ours, target)}, {own} {_ending(theirs, target)}{_cost(config, ours, theirs)}"
    losses = f"val loss {loss_text(ours.val_loss)} against {loss_text(theirs.val_loss)}"
    return f"{losses} with {own}{_cost(config, ours, theirs)}"


def _own_text(config: StudyConfig, study: Study, own: Trial) -> str:
    batch, rate = own.config.effective_batch_size, own.config.learning_rate
    return f"{whose(config, study, own)} (effective batch {batch}, learning rate {rate:.3g})"


def _ending(standing: Standing, target_loss: float | None) -> str:
    """Return what a run came to under the objective, with its verb."""
    if target_loss is None:
        return f"ends at val loss {loss_text(standing.val_loss)}"
    if standing.reached:
        return f"reaches val loss {target_loss:g} after {training_time_text(standing.score)} of training"
    took, soon = standing.first.metric("train_seconds"), ""
    if took and standing.score > FAR * took:
        soon = f" and would not reach {target_loss:g} in {FAR} times that training"
    elif math.isfinite(standing.score):
        soon = f" and would reach {target_loss:g} after about {training_time_text(standing.score)}"
    return f"ends at val loss {loss_text(standing.val_loss)}{soon}"


FAR = 100
"""A time beyond so many times what a run took is no projection of it any more: its last two evaluations hardly differ."""


def _at_its_rate(ours: Standing, theirs: Standing, target_loss: float | None) -> str:
    if target_loss is None:
        return f"this learning rate brings it from {loss_text(theirs.val_loss)} to {loss_text(ours.val_loss)}"
    return f"with this learning rate it {_ending(ours, target_loss)}, with your own it {_ending(theirs, target_loss)}"


SAME_TIME = 0.05
"""Training times that differ by a smaller share are told as one."""


def _cost(config: StudyConfig, ours: Standing, theirs: Standing) -> str:
    """Return after what, as it was measured; nothing where the objective is that."""
    if config.objective == "target":
        return ""
    if config.objective == "samples":
        return " after the same samples"
    seconds = [[trial.metric("train_seconds") for trial in one.trials] for one in (ours, theirs)]
    took = [statistics.fmean(known) for some in seconds if (known := list(filter(None, some)))]
    if len(took) < 2:
        return " after the same training time"
    if abs(took[0] / took[1] - 1) <= SAME_TIME:
        return f" after the same training time ({training_time_text(took[1])})"
    return f", after {training_time_text(took[0])} and {training_time_text(took[1])} of training"


def _how_the_baseline_ended(config: StudyConfig, study: Study) -> str:
    """Return that the user's own batch and learning rate did not train to their end, with how many seeds; nothing where they were not tried."""
    baseline = last_baseline(study)
    if baseline is None:
        return ""
    ended = "diverged" if baseline.cause is Cause.DIVERGED else f"did not finish ({baseline.explanation})"
    seeds = study.seeds_of(baseline)
    alike = sum(one.state is baseline.state and one.cause is baseline.cause for one in seeds)
    with_seeds = f" with {alike} of {len(seeds)} seeds" if len(seeds) > 1 else ""
    return f"; {_own_text(config, study, baseline)} {ended}{with_seeds}"


def _sure(config: StudyConfig, known: Known) -> str:
    """Return how far the setting may lie from the best one, and what is left open."""
    if known.overfitting:
        return f"; undetermined: {overfitting_text(known.overfitting)}"
    told = f"; {wasted_text(config, known)}"
    return f"{told}; undetermined {open_text(config, known)}" if known.is_open(config.useful_gain) else told


def useful_text(config: StudyConfig) -> str:
    """Return what is worth a change, as exactly as it was given."""
    return f"{100 * config.useful_gain:g}%"


def wasted_text(config: StudyConfig, known: Known) -> str:
    """Return what the setting wastes."""
    return f"this setting wastes {share_text(known.regret_time)} of {_the_cost(config)} on average against the best one"


def overfitting_text(overfitting: Overfitting) -> str:
    """Return why runs that overfit decide nothing."""
    return f"the run with it overfits: {overfitting}, so the ends of runs of this length do not tell which setting trains fastest"


def open_text(config: StudyConfig, known: Known) -> str:
    """Return between what the study could not decide."""
    between, (mine, *_) = undecided_between(config, known), known.p_best
    if not between:
        return f"at which learning rate ({known.rates[0]:.2g} to {known.rates[1]:.2g})"
    return (
        f"between effective batches {listed(between)} ({mine} with probability {probability_text(known.p_best[mine])})"
    )


MOST_GROWTH = 1.1
"""Samples/s that grow by less than this factor, from the smallest batch to any other, give larger batches nothing to win."""


def _of_the_host(study: Study) -> str:
    """Return that a larger batch is no faster on this machine, where its timings exclude that; nothing elsewhere."""
    throughput = found(study, ThroughputFindings)
    first, *others = throughput.rates if throughput and throughput.rates else (None,)
    if first is None or not others or max(rate.high for rate in others) > MOST_GROWTH * first.low:
        return ""
    rates = [rate.samples_per_second for rate in (first, *others)]
    return (
        f" Samples/s do not grow with the batch on this machine: {number_text(min(rates))} to "
        f"{number_text(max(rates))} at effective batches {first.effective_batch_size} to "
        f"{others[-1].effective_batch_size}."
    )
