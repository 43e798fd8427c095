"""What runs of several lengths come to at the length of the real run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from batchscout.orchestrator.config.stages import Horizons
from batchscout.orchestrator.config.trial import scaled_learning_rate
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates import surface
from batchscout.orchestrator.stages.estimates.ranking import Standing, late_gain, standings
from batchscout.orchestrator.stages.estimates.surface import Array
from batchscout.orchestrator.stages.findings import concluded
from batchscout.orchestrator.stages.horizons.extrapolate import BestRate, Ended, best_of_three, losses_at, rate_at
from batchscout.orchestrator.stages.horizons.findings import BatchAtLength, HorizonsFindings
from batchscout.orchestrator.stages.horizons.propose import RATE_FACTOR, Rival, name_of, rivals
from batchscout.orchestrator.stages.train import BatchFindings, trained
from batchscout.orchestrator.study.state import Conclusion
from batchscout.orchestrator.units import number_text

NINETY_PERCENT = 1.645
"""The normal quantile of the ends of a 90 % interval."""
SURE = 0.9
"""The probability from which on a batch is told to be the better one."""


def conclude(context: StageContext[Horizons]) -> Conclusion:
    """Conclude with the batch and the learning rate for the real run's length."""
    ended = {one.name: one for one in standings(context.trials())}
    known = [(rival, curve_of(context, rival, ended)) for rival in rivals(context)]
    measured = [(rival, curve) for rival, curve in known if len(curve) > 1]
    if not measured or min(run.loss for _, curve in measured for run in curve) <= 0:
        reason = "undetermined: too few runs of other lengths finished with a positive loss; see the trials' reasons"
        return Conclusion("horizons", ok=True, reason=reason)
    length = length_of(context)
    draws = losses_at(length, [curve for _, curve in measured])
    batches = [_at_length(rival, draws, number) for number, (rival, _) in enumerate(measured)]
    best = max(batches, key=lambda one: one.p_best)
    rate = _rate(context, measured[0][0], ended, length)
    findings = _findings(context, best, batches, rate, measured)
    notes = tuple(f"effective batch {rival.effective_batch_size} was left out: {len(curve)} of its lengths finished"
                  for rival, curve in known if len(curve) <= 1)  # fmt: skip
    return concluded(findings, _sentence(context, findings, best), notes)


def length_of(context: StageContext[Horizons]) -> float:
    """Return the real run's length, as a share of the study's own."""
    assert context.config.real_run, "a study with this stage has a real run"
    return context.config.real_run.samples / context.config.sample_budget


def curve_of(context: StageContext[Horizons], rival: Rival, ended: dict[str, Standing]) -> list[Ended]:
    """Return what the batch's runs of every length ended at, the shortest first."""
    shorter = [(share, ended.get(name_of(rival, share, 1.0))) for share in sorted(context.stage.shares)]
    runs = [(share, one) for share, one in [*shorter, (1.0, rival.best)] if one is not None]
    return [Ended(share, one.val_loss, _deviation(context, one)) for share, one in runs]


def _deviation(context: StageContext[Horizons], standing: Standing) -> float:
    findings = trained(context.study)
    of_seed = findings.seed_deviation if findings and context.config.objective != "target" else None
    return (of_seed or surface.PRIOR.seed_deviation * late_gain([standing])) / math.sqrt(len(standing.trials))


def _at_length(rival: Rival, draws: Array, number: int) -> BatchAtLength:
    low, middle, high = np.quantile(draws[:, number], (0.05, 0.5, 0.95))
    p_best = float((draws[:, number] <= draws.min(axis=1)).mean())
    return BatchAtLength(rival.effective_batch_size, float(middle), float(low), float(high), p_best)


def _rate(context: StageContext[Horizons], rival: Rival, ended: dict[str, Standing], length: float) -> BestRate:
    """Return the best learning rate of the study's batch at the real run's length."""
    findings = trained(context.study)
    of_batch = findings.of_batch(rival.effective_batch_size) if findings else None
    known = BestRate(1.0, math.log2(rival.learning_rate), _rate_deviation(of_batch))
    share = min(context.stage.shares)
    names = [name_of(rival, share, factor) for factor in (1 / RATE_FACTOR, 1.0, RATE_FACTOR)]
    low, middle, high = (ended.get(name) for name in names)
    if low is None or middle is None or high is None:
        return rate_at(length, known, None)
    losses = low.val_loss, middle.val_loss, high.val_loss
    short = best_of_three(rival.learning_rate, RATE_FACTOR, losses, _deviation(context, middle))
    return rate_at(length, known, BestRate(share, *short))


def _rate_deviation(of_batch: BatchFindings | None) -> float:
    """Return how far, in factors of 2, the study's own best rate may be off; one where it says nothing."""
    if of_batch is None:
        return 1.0
    return max(0.1, math.log2(of_batch.learning_rate_high / of_batch.learning_rate_low) / (2 * NINETY_PERCENT))


def _findings(
    context: StageContext[Horizons], best: BatchAtLength, batches: Sequence[BatchAtLength], rate: BestRate,
    measured: Sequence[tuple[Rival, list[Ended]]],
) -> HorizonsFindings:  # fmt: skip
    assert context.config.real_run, "a study with this stage has a real run"
    optimizer, own = context.config.optimizer, measured[0][0].effective_batch_size
    share = scaled_learning_rate(optimizer, best.effective_batch_size) / scaled_learning_rate(optimizer, own)
    ends = [share * 2 ** (rate.log2_rate + side * NINETY_PERCENT * rate.deviation) for side in (-1, 0, 1)]
    return HorizonsFindings(
        context.config.real_run.samples,
        best.effective_batch_size,
        learning_rate=ends[1],
        learning_rate_low=ends[0],
        learning_rate_high=ends[2],
        batches=tuple(sorted(batches, key=lambda one: one.effective_batch_size)),
        crossing_samples=_crossing(context, [curve for _, curve in measured]),
    )


def _crossing(context: StageContext[Horizons], curves: Sequence[Sequence[Ended]]) -> float | None:
    """Return where the likeliest curves of two batches cross, between the study's length and the real run's."""
    if len(curves) < 2:
        return None
    lengths = np.geomspace(1.0, length_of(context), 9)
    gaps = [float(np.median(draws[:, 0] - draws[:, 1])) for draws in (losses_at(float(x), curves) for x in lengths)]
    place = next((i for i in range(1, len(gaps)) if gaps[i - 1] * gaps[i] < 0), None)
    return None if place is None else float(lengths[place]) * context.config.sample_budget


def _sentence(context: StageContext[Horizons], findings: HorizonsFindings, best: BatchAtLength) -> str:
    rate = f"learning rate {findings.learning_rate:.2g} [{findings.learning_rate_low:.2g}, {findings.learning_rate_high:.2g}]"
    loss = f"about {best.val_loss:.3f} [{best.val_loss_low:.3f}, {best.val_loss_high:.3f}]"
    what = (
        f"for {number_text(findings.samples)} samples ({number_text(length_of(context))} x this study's): effective batch "
        f"{best.effective_batch_size} at {rate}, val loss {loss}"
    )
    if len(findings.batches) == 1:
        return what
    other = next(
        one for one in findings.batches if one is not best and one.effective_batch_size != best.effective_batch_size
    )
    sure = (
        f"better than {other.effective_batch_size} with probability {best.p_best:.2f}"
        if best.p_best >= SURE
        else f"undetermined against {other.effective_batch_size} (this one with probability {best.p_best:.2f})"
    )
    crossing = findings.crossing_samples
    return f"{what}; {sure}" + (f"; they cross at about {number_text(crossing)} samples" if crossing else "")
