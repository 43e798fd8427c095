"""The horizons stage's runs: whole runs of the two likeliest batches, at shares of the study's length."""

from __future__ import annotations

from batchscout.orchestrator.config.mode import mode_of
from batchscout.orchestrator.config.stages import Horizons
from batchscout.orchestrator.stages.candidates import Candidate, seeded
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.ranking import Standing, standings
from batchscout.orchestrator.stages.train import chosen_run, full_runs, trained
from batchscout.orchestrator.study.trial import Proposal

RATE_FACTOR = 2.0


def rivals(context: StageContext[Horizons]) -> list[Standing]:
    """Return the run that train chose, and the best one of the likeliest other batch that finished; none where train has chosen none."""
    findings, winner = trained(context.study), chosen_run(context.study)
    if findings is None or winner is None:
        return []
    ranking = standings(full_runs(context.study))
    chosen = next(one for one in ranking if one.first.id == winner)
    best = {one.config.effective_batch_size: one for one in reversed(ranking)}
    likely = sorted(findings.batches, key=lambda one: -one.p_best)
    others = [best[one.effective_batch_size] for one in likely if one.effective_batch_size in best]
    own = chosen.config.effective_batch_size
    return [chosen, *[one for one in others if one.config.effective_batch_size != own][:1]]


def propose(context: StageContext[Horizons]) -> list[Proposal]:
    """Return both runs at every share of the study's length, and the chosen one at two more rates at the shortest."""
    found_rivals = rivals(context)
    shares = sorted(context.stage.shares)
    proposals = [run for rival in found_rivals for share in shares for run in _runs(context, rival, share, 1.0)]
    for chosen in found_rivals[:1]:
        for factor in (1 / RATE_FACTOR, RATE_FACTOR):
            proposals += _runs(context, chosen, shares[0], factor)
    return proposals


def _runs(context: StageContext[Horizons], rival: Standing, share: float, factor: float) -> list[Proposal]:
    config = rival.config
    steps = max(1, round(share * config.sample_budget / config.effective_batch_size))
    candidate = Candidate("", config.split, mode_of(config), steps * config.effective_batch_size)
    beside = "" if factor == 1.0 else f"-x{factor:g}"
    name = f"horizons-b{config.effective_batch_size}-{share:g}{beside}"
    return seeded(context, name, candidate, learning_rate=config.learning_rate * factor)
