"""The horizons stage's runs: whole runs of the two likeliest batches, at shares of the study's length."""

from __future__ import annotations

from dataclasses import dataclass

from batchscout.orchestrator.config.mode import mode_of
from batchscout.orchestrator.config.stages import Horizons
from batchscout.orchestrator.stages.candidates import Candidate, seeded
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.ranking import Standing, standings
from batchscout.orchestrator.stages.train import LearningRateFindings, TrainFindings, trained
from batchscout.orchestrator.study.trial import Proposal

RATE_FACTOR = 2.0


@dataclass(frozen=True)
class Rival:
    """A batch whose runs are repeated at other lengths."""

    best: Standing
    """Its best run at the study's own length."""

    @property
    def effective_batch_size(self) -> int:
        return self.best.trials[0].config.effective_batch_size

    @property
    def learning_rate(self) -> float:
        return self.best.trials[0].config.learning_rate


def rivals(context: StageContext[Horizons]) -> list[Rival]:
    """Return the batch that train chose, at its best rate, and the likeliest other one that finished; none where train
    has chosen none."""
    findings = trained(context.study)
    if findings is None:
        return []
    stages = (TrainFindings.STAGE, LearningRateFindings.STAGE)
    ranking = standings([trial for stage in stages for trial in context.study.of_stage(stage)])
    best: dict[int, Rival] = {}
    for standing in ranking:
        best.setdefault(standing.trials[0].config.effective_batch_size, Rival(standing))
    chosen = context.study.trials[findings.winner].config.effective_batch_size
    likely = sorted(findings.batches, key=lambda one: -one.p_best)
    others = [best[one.effective_batch_size] for one in likely if one.effective_batch_size in best]
    return [best[chosen], *[one for one in others if one.effective_batch_size != chosen][:1]]


def propose(context: StageContext[Horizons]) -> list[Proposal]:
    """Return both batches at every share of the study's length, and two more rates of the chosen one at the shortest."""
    found_rivals = rivals(context)
    shares = sorted(context.stage.shares)
    proposals = [run for rival in found_rivals for share in shares for run in _runs(context, rival, share, 1.0)]
    for rival in found_rivals[:1]:
        for factor in (1 / RATE_FACTOR, RATE_FACTOR):
            proposals += _runs(context, rival, shares[0], factor)
    return proposals


def name_of(rival: Rival, share: float, factor: float) -> str:
    """Return the candidate of a run: its seeds share it."""
    beside = "" if factor == 1.0 else f"-x{factor:g}"
    return f"horizons-b{rival.effective_batch_size}-{share:g}{beside}"


def _runs(context: StageContext[Horizons], rival: Rival, share: float, factor: float) -> list[Proposal]:
    config = rival.best.trials[0].config
    split = context.split(config.micro_batch_size, config.gradient_accumulation_steps)
    steps = max(1, round(share * config.sample_budget / config.effective_batch_size))
    candidate = Candidate("", split, mode_of(config), steps * config.effective_batch_size)
    rate = rival.learning_rate * factor
    return seeded(context, name_of(rival, share, factor), candidate, learning_rate=rate)
