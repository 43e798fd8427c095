"""Is the scaling rule right here? A small grid around the winner's learning rate; the centre is the winner's own run."""

from __future__ import annotations

from orchestrator.analysis import Standing, standings
from orchestrator.config import LearningRate
from orchestrator.stages.setting import Setting
from orchestrator.stages.train import Candidate, seeded
from orchestrator.study import Conclusion, Proposal, Study, Trial


def propose(stage: LearningRate, setting: Setting, study: Study) -> list[Proposal]:
    """Every multiplier but 1 where the train stage has run the centre already."""
    centre = _winner(study)
    if centre is None:
        size, accumulation = setting.chosen_batch(study)
        found, learning_rate = Candidate("", size, accumulation), setting.trial(study, size, accumulation).learning_rate
    else:
        config = centre.config
        mode = tuple((key, getattr(config, key)) for key in ("activation_checkpointing", "compile", "precision"))
        found = Candidate("", config.micro_batch_size, config.gradient_accumulation_steps, mode)
        learning_rate = config.learning_rate
    return [
        proposal
        for multiplier in stage.multipliers
        if multiplier != 1 or centre is None
        for proposal in _at(multiplier, learning_rate, found, setting, study)
    ]


def _at(multiplier: float, learning_rate: float, found: Candidate, setting: Setting, study: Study) -> list[Proposal]:
    changes = dict(found.mode) | {"learning_rate": learning_rate * multiplier}
    return seeded(f"learning_rate-x{multiplier:g}", "learning_rate", found, changes, setting, study)


def _winner(study: Study) -> Trial | None:
    name = study.value("train", "winner") or study.value("grid", "winner")
    return study.trials[name] if name else None


def conclude(stage: LearningRate, setting: Setting, study: Study) -> Conclusion:
    """The best learning rate, and whether the grid ends there."""
    centre = _winner(study)
    from_train = [t for t in study.trials.values() if centre and t.stage == centre.stage and _same_but_seed(t, centre)]
    ranking = standings([*study.of_stage("learning_rate"), *from_train], "val_loss", None)
    if not ranking:
        return Conclusion(
            "learning_rate", False, "undetermined: no learning rate finished its run; see the trials' reasons"
        )
    rates = {_rate(one): one for one in ranking}
    best = ranking[0]
    tested = sorted({t.config.learning_rate for t in [*study.of_stage("learning_rate"), *from_train]})
    on_edge = len(tested) > 1 and _rate(best) in (tested[0], tested[-1])
    notes = (_warn(best, tested),) if on_edge else ()
    values = {
        "learning_rate": _rate(best),
        "winner": best.trials[0].id,
        "on_edge": on_edge,
        "losses": {f"{rate:.3g}": rates[rate].val_loss for rate in sorted(rates)},
    }
    return Conclusion("learning_rate", True, _sentence(best, centre, ranking), values, notes)


def _same_but_seed(trial: Trial, other: Trial) -> bool:
    return trial.config.model_copy(update={"seed": other.config.seed}) == other.config


def _rate(standing: Standing) -> float:
    return standing.trials[0].config.learning_rate


def _sentence(best: Standing, centre: Trial | None, ranking: list[Standing]) -> str:
    found = f"learning rate {_rate(best):.3g} ends at val loss {best.val_loss:.3f}, best of {len(ranking)}"
    if centre is None:
        return found
    if best.trials[0].config.learning_rate == centre.config.learning_rate:
        return f"{found}: the scaling rule's own"
    return f"{found}: {_rate(best) / centre.config.learning_rate:.2g} x the scaling rule's {centre.config.learning_rate:.3g}"


def _warn(best: Standing, tested: list[float]) -> str:
    side = "low" if _rate(best) == tested[0] else "high"
    return f"the best learning rate lies on the {side} edge of the grid ({tested[0]:.3g} to {tested[-1]:.3g}): widen the multipliers on that side"
