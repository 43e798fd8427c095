"""What speaks against a recommendation, or limits it: each in words, with what to do about it where something can be done. Pure."""

from __future__ import annotations

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.output.known import (
    baseline_run,
    chosen_from,
    chosen_of,
    failed_stage,
    is_projected,
    is_too_easy,
    known_of,
)
from batchscout.orchestrator.output.scope import scope_of
from batchscout.orchestrator.stages.context import disturbance_in
from batchscout.orchestrator.stages.equivalence import EquivalenceFindings
from batchscout.orchestrator.stages.estimates.generalisation import overfitting_of
from batchscout.orchestrator.stages.estimates.next_run import is_beyond
from batchscout.orchestrator.stages.estimates.node_speeds import stragglers
from batchscout.orchestrator.stages.findings import found
from batchscout.orchestrator.stages.frontier.findings import FrontierFindings
from batchscout.orchestrator.stages.horizons import HorizonsFindings, carried_to
from batchscout.orchestrator.stages.input_bound import input_bound
from batchscout.orchestrator.stages.throughput import ThroughputFindings
from batchscout.orchestrator.stages.too_short import TooShort, in_words, out_of_reach
from batchscout.orchestrator.stages.train import LearningRateFindings, not_run, trained
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial, TrialState
from batchscout.orchestrator.units import number_text
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.notices import NoticeKind

FEW_PASSES = 4
"""Up to so many passes over the data a repeated sample is worth nearly as much as a new one (Muennighoff et al. 2023, arXiv
2305.16264); finetuning takes 2 to 4 as a rule (Devlin et al. 2018, arXiv 1810.04805)."""


_OF_THE_COMPARISON = (
    NoticeKind.KEPT_TRIALS,
    NoticeKind.UNSTEADY_DATA,
    NoticeKind.VALIDATES_ON_TRAINING,
    NoticeKind.ONE_VALIDATION_SAMPLE,
)


def caveats_of(config: StudyConfig, study: Study, winner: Trial, nearest: Trial, trial: TrialConfig) -> tuple[str, ...]:
    """Return all that speaks against a recommendation or limits it, what matters most first. Never empty: the last says what was measured.

    winner: the study's choice; nearest: the run of the study that is most like `trial`, which is recommended.
    """
    short = worth_a_longer_run(config, study)
    edge = at_an_end(config, study, winner)
    limits = [
        f"the study's runs are too short for {in_words(short)}" if short else "",
        f"it is the {edge}" if edge else "",
        RATE_ON_EDGE if is_on_edge(config, study, winner) else "",
        _splits_differ(study),
    ]
    measured = f"measured with {scope_of(config, study, winner)}"
    if asks_for_the_length(config, study, winner):
        measured += "; for a longer run, give real_run.samples"
    evidence, run = _of_the_evidence(config, study, nearest), _of_the_run(config, study, nearest, trial)
    return tuple(filter(None, [*evidence, *limits, *run, measured]))


def warnings_of(config: StudyConfig, study: Study, nearest: Trial, trial: TrialConfig) -> list[str]:
    """Return what speaks against the recommendation: speeds that say little, a run that learns its samples by heart, or
    meets few of them often."""
    return [*_of_the_evidence(config, study, nearest), *_of_the_run(config, study, nearest, trial)]


def _of_the_evidence(config: StudyConfig, study: Study, nearest: Trial) -> list[str]:
    warnings = [
        projected(config, study, nearest),
        too_easy(config, study, nearest),
        _own_schedule_unknown(config, study),
    ]
    warnings += [notice.text for notice in study.notices.get(None, []) if notice.kind in _OF_THE_COMPARISON]
    baseline = baseline_run(study)
    if baseline is not None and (own := not_run(config, study, baseline)):
        warnings.append(
            f"your own effective batch {own} was not run; figures are against {baseline.config.effective_batch_size}, the nearest that was"
        )
    warnings += [lane_deaths_text(study), _hardly_trains(config, study)]
    warnings += [not_carried(config, study, nearest), _overfits(study, nearest)]
    frontier, throughput = found(study, FrontierFindings), found(study, ThroughputFindings)
    is_busy = {"frontier": bool(frontier and frontier.disturbed), "throughput": bool(throughput and throughput.busy)}
    if busy := [stage for stage, is_so in is_busy.items() if is_so]:
        warnings.append(
            f"the machine was busy, or its speed uneven, while speeds were timed ({', '.join(busy)}), and these speeds decide which batches "
            "took part and for how long each trained; repeat the study when it is quiet, or with more rounds"
        )
    findings = trained(study)
    if findings and findings.off_speed:
        off = ", ".join(f"effective batch {batch} at {share:.2f} x" for batch, share in findings.off_speed.items())
        warnings.append(
            f"some batches did not train at the speed they were timed at ({off}), so they trained for more or less time than "
            "planned; the probability corrects for that"
        )
    return [*filter(None, warnings)]


def projected(config: StudyConfig, study: Study, winner: Trial) -> str:
    """Return that the runs were compared by projections, as the target loss was out of their reach; empty where it was not, and without one."""
    if not is_projected(config, study, winner):
        return ""
    return (
        f"no setting that was compared reached target_loss ({config.target_loss:g}); training times until then are projected from the last two "
        "evaluations of each run, and are less sure than any interval says"
    )


def too_easy(config: StudyConfig, study: Study, winner: Trial) -> str:
    """Return that nobody saw when the target loss was reached; empty where it was not, and without one."""
    if not is_too_easy(config, study, winner):
        return ""
    return f"target_loss ({config.target_loss:g}) was reached by the first evaluation already: which setting comes there sooner is not known"


def _overfits(study: Study, nearest: Trial) -> str:
    """Return where the recommended run began to overfit; empty where it did not, and where the verdict says so."""
    findings, overfitting = trained(study), overfitting_of(nearest)
    if overfitting is None or (findings and findings.overfitting):
        return ""
    return f"it overfits: {overfitting}; a shorter run or more regularization may end lower"


def _own_schedule_unknown(config: StudyConfig, study: Study) -> str:
    """Return that what trains elsewhere may have another schedule than all runs had; empty where its own is known, or one was given."""
    own = study.facts.own_run
    if own is None or own.schedule is not None or "schedule" in study.given:
        return ""
    return (
        f"your learning-rate schedule could not be found out, so all runs, also those of your own settings, used {config.schedule.type}; the "
        "recommended rate and the time saved hold for that: train with it, or set schedule to yours and repeat the study"
    )


def _splits_differ(study: Study) -> str:
    """Return that a batch trains otherwise in other micro-batches; empty where it does not, or that was not looked at."""
    findings = found(study, EquivalenceFindings)
    if findings is None or findings.judgement not in ("splits_differ", "no_sum"):
        return ""
    return (
        "splits of one batch do not train alike (equivalence), so the comparison holds only for the micro-batch sizes that were trained: keep "
        "the recommended one"
    )


def _of_the_run(config: StudyConfig, study: Study, nearest: Trial, trial: TrialConfig) -> list[str]:
    warnings = [slow] if (slow := _slower_than_the_baseline(config, study, nearest)) else []
    warnings += map(str, stragglers(study.trials.values()).values())
    if waits := input_bound([nearest]):
        warnings.append(f"the recommended run is {waits}")
    num_samples, budget = study.facts.num_train_samples, trial.sample_budget
    if config.real_run and carried_to(study, nearest) and num_samples and budget > FEW_PASSES * num_samples:
        most = max(one.config.sample_budget for one in study.trials.values() if one.is_full_run)
        warnings.append(
            f"the real run takes each of the {num_samples:,} training samples {budget / num_samples:.0f} times, and no run that was measured more "
            f"than {most / num_samples:.1f} times: the prediction leaves out what repetition and overfitting do there"
        )
    if config.regime == "finetune" and num_samples and budget > FEW_PASSES * num_samples:
        warnings.append(
            f"it sees each of the {num_samples:,} training samples {budget / num_samples:.1f} times, and finetuning takes 2 to "
            f"{FEW_PASSES} passes as a rule; compare with a sample_budget of at most {FEW_PASSES * num_samples:,}"
        )
    return warnings


def lane_deaths_text(study: Study) -> str:
    """Return how often the processes of lanes died though no trial failed of it, and how the first did; empty where none has."""
    told = [
        f"{trial_id}: {notice.text}"
        for trial_id, notices in study.notices.items()
        for notice in notices
        if notice.kind is NoticeKind.LANE_DIED
    ]
    if not told:
        return ""
    times, first = ("once", "") if len(told) == 1 else (f"{len(told)} times", "The first: ")
    return (
        f"processes that ran trials died {times}: each death costs the start of new ones, and a run of your own may end so, "
        f"too; find the cause. {first}{told[0]}"
    )


HARDLY = 1e-3
"""A loss that changes by less, as a share of itself, from one of a run's evaluations to another is that of a run that hardly trains."""


def _hardly_trains(config: StudyConfig, study: Study) -> str:
    """Return that no full run's loss changes; empty where one does, or none was evaluated twice."""
    runs = study.completed_runs
    curves = [[loss for point in trial.history if (loss := point.get("val_loss")) is not None] for trial in runs]
    changes = [(max(losses) - min(losses)) / abs(losses[0]) for losses in curves if len(losses) > 1 and losses[0]]
    if not changes or max(changes) >= HARDLY:
        return ""
    return (
        f"in no run did the validation loss change by more than {100 * max(changes):.2g}% from one evaluation to another, so batches and "
        f"learning rates can hardly be told apart; raise optimizer.lr ({config.optimizer.lr:g}) or sample_budget ({config.sample_budget:,})"
    )


def not_carried(config: StudyConfig, study: Study, winner: Trial) -> str:
    """Return why the answer is that of the study's own length where a real run was asked for; empty where it is the real run's."""
    if config.real_run is None or carried_to(study, winner):
        return ""
    concluded = study.conclusions.get(HorizonsFindings.STAGE)
    failed = failed_stage(study)
    why = f"the study ended at {failed.stage}" if failed else "horizons has yet to conclude"
    if concluded:
        why = concluded.reason
    if winner.config.ramp:
        why = "a growing batch is not carried to other lengths"
    return (
        f"this holds for a run of {number_text(config.sample_budget)} samples, the study's own, and not for the real run's "
        f"{number_text(config.real_run.samples)}: {why}"
    )


MUCH_SLOWER = 0.9
"""Speeds that are closer than that differ by no more than timings of a quiet machine may."""


def _slower_than_the_baseline(config: StudyConfig, study: Study, winner: Trial) -> str:
    """Return that the recommended run is slower than the baseline, in numbers; empty where it is not, or something else had the
    machine while one of them ran."""
    baseline = baseline_run(study)
    if baseline is None or any(disturbance_in(study, config, one.metrics) for one in (winner, baseline)):
        return ""
    ours, theirs = (trial.metric("tokens_per_second") for trial in (winner, baseline))
    if not ours or not theirs or ours > MUCH_SLOWER * theirs:
        return ""
    counted = (
        "a comparison at equal samples does not count that; objective: time does"
        if config.objective == "samples"
        else "the comparison at equal training time counts that"
    )
    return (
        f"it trains at {ours / theirs:.2f} x the baseline's speed ({number_text(ours)} against {number_text(theirs)} "
        f"{study.facts.rate_unit}), so "
        f"the same samples take {theirs / ours:.2g} times as long; {counted}"
    )


def at_an_end(config: StudyConfig, study: Study, winner: Trial) -> str:
    """Return that the batch is the smallest or the largest of those that were compared, where a further one is possible and
    it is likely to be the best of them."""
    known = known_of(config, study, winner)
    if known is None or len(known.p_best) == 1:
        return ""
    batch, *others = known.p_best
    if known.p_best[batch] < 0.5:
        return ""
    if config.world_size < batch < min(others):
        return "smallest batch that was compared: a smaller one may be better"
    return "largest batch that was compared: a larger one may be better" if batch > max(others) else ""


MUCH_FASTER = 1.1
"""A batch that is faster than all that were compared by less than this factor is not worth a longer study for its speed."""


def worth_a_longer_run(config: StudyConfig, study: Study) -> list[TooShort]:
    """Return the batches that would train much faster than all that were compared, but are too large for so short a run; none
    where speed does not count, where the user's own run overfits, and none for which the real run is too short, too."""
    frontier = found(study, FrontierFindings)
    findings = trained(study)
    if frontier is None or config.objective == "samples" or (findings and findings.overfitting):
        return []
    short = {one.effective_batch_size: one for one in out_of_reach(config, frontier.rates)}
    reached = [rate for size, rate in frontier.rates.items() if size * config.world_size not in short]
    fastest = MUCH_FASTER * max(reached, default=0.0)
    return [
        one
        for size, rate in frontier.rates.items()
        if (one := short.get(size * config.world_size)) is not None
        and rate > fastest
        and (config.real_run is None or one.sample_budget < config.real_run.samples)
    ]


RATE_ON_EDGE = "the learning rate is at the edge of those that were tried: one beyond it may be better"


def is_on_edge(config: StudyConfig, study: Study, winner: Trial) -> bool:
    """True where the learning rate, of the winner or of the run that it is a change of, is the lowest or the highest that was tried at its
    batch, and the best one lies further out, as far as that is known. False of a real run's, which need not be one that was tried."""
    chosen, findings, refined = chosen_of(config, study, winner), trained(study), found(study, LearningRateFindings)
    if carried_to(study, winner):
        return False
    if refined and refined.winner == chosen.id:
        return refined.on_edge
    batch, rate = chosen.config.effective_batch_size, chosen.config.learning_rate
    alike = [one for one in chosen_from(config, study) if one.config.effective_batch_size == batch]
    tried = {one.config.learning_rate for one in alike if one.state in (TrialState.COMPLETE, TrialState.PRUNED)}
    mine = findings.of_batch(batch) if findings else None
    return bool(tried) and is_beyond(tried, rate, mine.learning_rate if mine else None)


def asks_for_the_length(config: StudyConfig, study: Study, winner: Trial) -> bool:
    """True if the answer could be carried to the length of the user's run, and nobody has said how long that is."""
    known = known_of(config, study, winner)
    return known is not None and not known.overfitting and config.real_run is None and config.objective != "target"
