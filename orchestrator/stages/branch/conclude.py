"""What the branches and ramps come to: the critical batch at every point, in words and numbers, and whether a ramp wins."""

from __future__ import annotations

import math
from collections.abc import Sequence

from batchscout.orchestrator.config.stages import Branch, RampKind
from batchscout.orchestrator.stages.branch.critical import growth, points_of
from batchscout.orchestrator.stages.branch.findings import BranchFindings, Growth, PointFindings, RampRun
from batchscout.orchestrator.stages.branch.propose import ramp_name
from batchscout.orchestrator.stages.branch.source import source_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.estimates.ranking import Standing, luck_of_the_best, seed_deviation, standings
from batchscout.orchestrator.stages.findings import concluded
from batchscout.orchestrator.stages.train.choice import full_runs
from batchscout.orchestrator.study.state import Conclusion
from batchscout.orchestrator.units import loss_text, number_text, seconds_text


def conclude(context: StageContext[Branch]) -> Conclusion:
    """Conclude with the critical batch at every point. That it cannot be told is a result, too."""
    source = source_of(context)
    points = points_of(context, source)
    of_ramps = [trial for trial in context.trials() if trial.config.ramp]
    ranking = standings([*full_runs(context.study), *of_ramps], context.config.target_loss)
    chosen = next(one for one in ranking if source.trial.candidate == one.name)
    ramps = [one for one in ranking if one.config.ramp]
    kinds: dict[str, RampKind] = {ramp_name(kind): kind for kind in context.stage.ramps}
    luck = luck_of_the_best(ranking, len(ramps)) if ramps else 0.0
    winner = next((one for one in ramps[:1] if _wins(one, chosen, luck)), None)
    findings = BranchFindings(
        source=source.trial.id,
        points=points,
        growth=growth(points),
        spread=math.sqrt(2) * seed_deviation(standings(full_runs(context.study))),
        ramps=tuple(_ramp_run(kinds[one.name], one) for one in ramps),
        winner=winner.first.id if winner else None,
    )
    sentence = "; ".join(filter(None, (_of_points(findings), _of_ramps(context, ramps, chosen, winner, luck))))
    return concluded(findings, sentence, (*source.left_out, *_notes(context, findings)))


def _wins(ramp: Standing, chosen: Standing, luck: float) -> bool:
    """True if a ramp is better than the chosen run by more than the seeds alone may make."""
    if ramp.reached != chosen.reached:
        return ramp.reached
    return ramp.score < chosen.score - luck


def _ramp_run(kind: RampKind, standing: Standing) -> RampRun:
    first = standing.first
    batch, budget = first.config.last_effective_batch_size, first.config.sample_budget
    return RampRun(kind, first.id, batch, budget, standing.val_loss, standing.score)


def _of_points(findings: BranchFindings) -> str:
    if not findings.points:
        return "undetermined: the chosen run is too short to branch from, or no branch finished; see the notes"
    told = [f"{_critical_text(point)} at {number_text(point.samples_seen)} samples" for point in findings.points]
    grew = f": {_GROWTH[findings.growth]}" if len(findings.points) > 1 else ""
    return f"the critical batch is {', '.join(told)}{grew}"


_GROWTH: dict[Growth, str] = {
    "grew": "it grew",
    "stayed": "it did not grow",
    "shrank": "it shrank",
    "undetermined": "whether it grew is undetermined",
}


def _critical_text(point: PointFindings) -> str:
    """Return the critical batch at a point, with what is lost beyond it."""
    if point.critical_batch_size is None:
        above = f"from {point.low} to below {point.high}" if point.high is not None else f"{point.low} or more"
        return f"undetermined ({above})"
    if point.high is None:
        return f"{point.low} or more"
    lost = next(one for one in point.losses if one.effective_batch_size == point.high)
    return (
        f"{point.low} ({point.high} {'diverges' if lost.excess is None else f'ends {loss_text(lost.excess)} higher'})"
    )


def _of_ramps(
    context: StageContext[Branch],
    ramps: Sequence[Standing],
    chosen: Standing,
    winner: Standing | None,
    luck: float,
) -> str:
    if not ramps:
        return ""
    spread = seconds_text(luck) if context.config.target_loss is not None else loss_text(luck)
    told = ", ".join(f"the {one.first.role} {_ending(context, one)}" for one in ramps)
    who = "no ramp" if winner is None else f"the {winner.first.role}"
    return f"{told}, the chosen run {_ending(context, chosen)}: {who} wins by more than the seeds' spread ({spread})"


def _ending(context: StageContext[Branch], standing: Standing) -> str:
    if context.config.target_loss is not None and standing.reached:
        return f"reaches the target after {seconds_text(standing.score)}"
    return f"ends at {loss_text(standing.val_loss)}"


def _notes(context: StageContext[Branch], findings: BranchFindings) -> list[str]:
    """Return what the seeds' deviation rests on, and which runs did not finish."""
    lost = [trial for trial in context.trials() if trial.state.ruled_out]
    told = [f"{trial.id} did not finish: {trial.explanation}" for trial in lost]
    if findings.points and len(context.config.seeds) == 1:
        told.append(
            f"one seed: that a loss comes back within {loss_text(findings.spread)} is judged by a prior of how much runs differ; "
            "give several seeds to measure it"
        )
    return told
