"""Is the scaling rule right here? A small grid around the rule's learning rate, at the batch that won.

What was run at that batch before, the unscaled contrast included, is a point of the grid too.
"""

from __future__ import annotations

import math

from orchestrator.config.stages import LearningRate
from orchestrator.config.trial import scaled_learning_rate
from orchestrator.stages.candidates import Candidate, seeded
from orchestrator.stages.context import Setting
from orchestrator.stages.mode import mode_of
from orchestrator.stages.ranking import Standing, standings, tied
from orchestrator.study.state import Conclusion, Proposal, Study, Trial

# Rates within this share of each other are one point of the grid: 0.71 of the centre and 1/sqrt(2) of it.
SAME_RATE = 0.01


def propose(stage: LearningRate, setting: Setting, study: Study) -> list[Proposal]:
    """Every multiple of the centre that was not run before."""
    winner, centre = _winner(study), _centre(setting, study)
    tried = {trial.config.learning_rate for trial in run_before(study)}
    if winner is None:
        found = Candidate("", *setting.chosen_batch(study))
    else:
        config = winner.config
        found = Candidate("", config.micro_batch_size, config.gradient_accumulation_steps, mode_of(config))
    return [
        proposal
        for multiplier in stage.multipliers
        if not any(math.isclose(multiplier * centre, rate, rel_tol=SAME_RATE) for rate in tried)
        for proposal in seeded(
            f"learning_rate-x{multiplier:g}",
            "learning_rate",
            found,
            {"learning_rate": multiplier * centre},
            setting,
            study,
        )
    ]


def _centre(setting: Setting, study: Study) -> float:
    """The rule's learning rate for the winner's batch; where a grid named its own, the winner's."""
    winner = _winner(study)
    if winner is None:
        return setting.trial(study, *setting.chosen_batch(study)).learning_rate
    if winner.stage == "grid":
        return winner.config.learning_rate
    return scaled_learning_rate(setting.study.optimizer, winner.config.effective_batch_size)


def _whose(study: Study) -> str:
    winner = _winner(study)
    return "the grid winner's" if winner and winner.stage == "grid" else "the scaling rule's"


def _winner(study: Study) -> Trial | None:
    name = study.value("train", "winner") or study.value("grid", "winner")
    return study.trials.get(name) if name else None


def run_before(study: Study) -> list[Trial]:
    """The winner's stage's trials of the winner's batch, at whatever learning rate."""
    winner = _winner(study)
    return [] if winner is None else [t for t in study.of_stage(winner.stage) if _batch(t) == _batch(winner)]


def _batch(trial: Trial) -> tuple[object, ...]:
    return trial.config.micro_batch_size, trial.config.gradient_accumulation_steps, trial.config.precision


def conclude(stage: LearningRate, setting: Setting, study: Study) -> Conclusion:
    """The best learning rate, and whether the grid ends there; a tie goes to the one nearest to the rule's."""
    trials = [*study.of_stage("learning_rate"), *run_before(study)]
    ranking = standings(trials, "val_loss", None)
    if not ranking:
        reason = "undetermined: no learning rate finished its run; see the trials' reasons"
        return Conclusion("learning_rate", False, reason)
    centre = _centre(setting, study)
    best = _settle(ranking, centre)
    tested = sorted({trial.config.learning_rate for trial in trials})
    on_edge = len(tested) > 1 and _rate(best) in (tested[0], tested[-1])
    values = {
        "learning_rate": _rate(best),
        "winner": best.trials[0].id,
        "on_edge": on_edge,
        "losses": {f"{_rate(one):.3g}": one.val_loss for one in sorted(ranking, key=_rate)},
    }
    notes = (_warn(best, tested),) if on_edge else ()
    return Conclusion("learning_rate", True, _sentence(best, ranking, centre, _whose(study)), values, notes)


def _settle(ranking: list[Standing], centre: float) -> Standing:
    equals = [one for one in ranking if tied(one.score, ranking[0].score)]
    return min(equals, key=lambda one: abs(math.log(_rate(one) / centre)))


def _rate(standing: Standing) -> float:
    return standing.trials[0].config.learning_rate


def _sentence(best: Standing, ranking: list[Standing], centre: float, whose: str) -> str:
    ties = [f"{_rate(one):.3g}" for one in ranking if one is not best and tied(one.score, best.score)]
    tie = f", tied with {', '.join(ties)}" if ties else ""
    ratio = _rate(best) / centre
    against = f"{whose} own" if math.isclose(ratio, 1) else f"{ratio:.2g} x {whose} {centre:.3g}"
    return (
        f"learning rate {_rate(best):.3g} ends at val loss {best.val_loss:.3f}, best of {len(ranking)}{tie}: {against}"
    )


def _warn(best: Standing, tested: list[float]) -> str:
    side = "low" if _rate(best) == tested[0] else "high"
    return (
        f"the best learning rate lies on the {side} edge of the grid ({tested[0]:.3g} to {tested[-1]:.3g}): "
        "widen the multipliers on that side"
    )
