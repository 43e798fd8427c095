"""Does the chosen batch want more regularization? The chosen run again, with one setting changed at a time.

A larger batch may end at a wider generalisation gap (see generalisation.py). Where the chosen one does, dropout, label smoothing
and weight decay are tried at its own batch and learning rate; a setting is kept where the loss falls by more than seeds vary.
Elsewhere nothing is trained.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from batchscout.orchestrator.config.mode import mode_of
from batchscout.orchestrator.config.stages import Regularization
from batchscout.orchestrator.stages.candidates import Candidate, seeded
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.curves import TRAINING_COLUMNS, loss_curves
from batchscout.orchestrator.stages.estimates.generalisation import Gap, Generalisation
from batchscout.orchestrator.stages.estimates.ranking import Standing, luck_of_the_best, standings
from batchscout.orchestrator.stages.figures import Figure
from batchscout.orchestrator.stages.findings import concluded, found, winner_of
from batchscout.orchestrator.stages.stage import Change, Stage
from batchscout.orchestrator.stages.train import TrainFindings, chosen_run, loss_deviation
from batchscout.orchestrator.study.state import Conclusion
from batchscout.orchestrator.study.trial import PLANNED_RATE, Proposal, Trial
from batchscout.orchestrator.units import gap_text, loss_text
from batchscout.trainers.criteria import spoken

Regularizer = Literal["dropout", "label_smoothing", "weight_decay"]


@dataclass(frozen=True)
class Setting:
    """One regularizer at another value than the chosen run has."""

    regularizer: Regularizer
    value: float

    def __str__(self) -> str:
        return f"{self.regularizer.replace('_', ' ')} {self.value:g}"

    @property
    def candidate(self) -> str:
        """What the runs with it are seeds of."""
        return f"regularization-{self.regularizer}-{self.value:g}"

    def change(self, source: str) -> Change:
        """Return it as a change of a trial."""
        value = {self.regularizer: self.value}
        return Change(source, optimizer=value) if self.regularizer == "weight_decay" else Change(source, model=value)


@dataclass(frozen=True)
class SettingRun:
    """What the chosen run came to with a setting."""

    setting: Setting
    trial: str
    """Its first seed."""
    val_loss: float
    generalisation_gap: float | None


@dataclass(frozen=True)
class RegularizationFindings:
    STAGE: ClassVar[str] = "regularization"

    source: str
    """The trial that was chosen before, which has none of the settings."""
    generalisation: Generalisation | None
    """The gaps by which it was decided whether to try any; None where no run measured one."""
    runs: tuple[SettingRun, ...] = ()
    """The best first."""
    spread: float | None = None
    """By how much the best of so many settings may end lower by its seeds alone; None where none was trained to its end."""
    kept: Setting | None = None
    winner: str | None = None
    """A trial: the first seed of the run with the setting that is kept."""


def propose(context: StageContext[Regularization]) -> list[Proposal]:
    """Return the chosen run with each setting, where its batch has the wider gap."""
    if not _is_wider(context):
        return []
    return [proposal for setting in _settings(context) for proposal in _runs_with(context, setting)]


def _source(context: StageContext[Regularization]) -> Trial:
    chosen = chosen_run(context.study)
    assert chosen is not None, "a study whose train stage chose nothing has ended"
    return context.study.trials[chosen]


def _generalisation(context: StageContext[Regularization]) -> Generalisation | None:
    trained = found(context.study, TrainFindings)
    return trained.generalisation if trained else None


def _gap(context: StageContext[Regularization]) -> Gap | None:
    """Return the gap of the chosen batch."""
    measured = _generalisation(context)
    return measured.of_batch(_source(context).config.effective_batch_size) if measured else None


def _is_wider(context: StageContext[Regularization]) -> bool:
    measured, gap = _generalisation(context), _gap(context)
    return measured is not None and gap is not None and measured.is_wider(gap)


def _settings(context: StageContext[Regularization]) -> list[Setting]:
    """Return what is to be tried, without what the chosen run has already."""
    stage, own = context.stage, _own(context)
    decay = own["weight_decay"]
    wanted: dict[Regularizer, Sequence[float]] = {
        "dropout": stage.dropout,
        "label_smoothing": stage.label_smoothing,
        "weight_decay": [multiple * decay for multiple in stage.weight_decay] if decay else [],
    }
    return [
        Setting(regularizer, value)
        for regularizer, values in wanted.items()
        for value in dict.fromkeys(values)
        if regularizer in own and not math.isclose(value, own[regularizer])
    ]


def _own(context: StageContext[Regularization]) -> dict[Regularizer, float]:
    """Return what can be set, as the chosen run has it."""
    chosen, takes = _source(context).config, context.study.facts.regularizers or {}
    optimizer = chosen.optimizer  # one of the user's own has its decay in arguments that only it knows
    own: dict[Regularizer, float] = {"weight_decay": 0.0 if optimizer.type == "own" else optimizer.weight_decay}
    if "dropout" in takes:
        own["dropout"] = takes["dropout"]
    if "label_smoothing" in takes and _why_unsmoothed(context) is None:
        own["label_smoothing"] = takes["label_smoothing"]
    return own


def _why_unsmoothed(context: StageContext[Regularization]) -> str | None:
    """Return why labels cannot be smoothed; None if they can."""
    if context.config.loss is not None:
        return f"the loss is {spoken(context.config.loss)}"
    if "label_smoothing" not in (context.study.facts.regularizers or {}):
        return f"the loss is that of {context.config.model.target}"
    return None


def _runs_with(context: StageContext[Regularization], setting: Setting) -> list[Proposal]:
    source = _source(context)
    chosen, rate = source.config, source.proposal.expected.get(PLANNED_RATE)
    change = setting.change(source.id)
    return seeded(
        context,
        setting.candidate,
        Candidate(str(setting), chosen.split, mode_of(chosen), chosen.sample_budget, rate),
        learning_rate=chosen.learning_rate,
        warmup_samples=chosen.warmup_samples,
        model=chosen.model.model_dump() | {"kwargs": {**chosen.model.kwargs, **change.model}},
        optimizer={**chosen.optimizer.model_dump(), **change.optimizer},
    )


def conclude(context: StageContext[Regularization]) -> Conclusion:
    """Conclude with the setting that is kept, if any. That there was nothing to mend is a result, too."""
    source, measured, gap = _source(context), _generalisation(context), _gap(context)
    if measured is None or gap is None or not measured.is_wider(gap):
        return concluded(RegularizationFindings(source.id, measured), _nothing_to_mend(measured, gap))
    ranking = standings([*context.study.seeds_of(source), *context.trials()])
    plain = next(one for one in ranking if one.name == source.candidate)
    by_name = {setting.candidate: setting for setting in _settings(context)}
    others = [one for one in ranking if one is not plain]
    spread = luck_of_the_best(ranking, len(others)) if others else None
    best = next((one for one in others[:1] if spread is not None and plain.val_loss - one.val_loss > spread), None)
    findings = RegularizationFindings(
        source=source.id,
        generalisation=measured,
        runs=tuple(_setting_run(by_name[one.name], one) for one in others),
        spread=spread,
        kept=by_name[best.name] if best else None,
        winner=best.first.id if best else None,
    )
    return concluded(findings, _sentence(measured, gap, plain, findings), tuple(_notes(context, findings)))


def _setting_run(setting: Setting, standing: Standing) -> SettingRun:
    gaps = [gap for trial in standing.trials if (gap := trial.metric("generalisation_gap")) is not None]
    return SettingRun(setting, standing.first.id, standing.val_loss, statistics.fmean(gaps) if gaps else None)


def _nothing_to_mend(measured: Generalisation | None, gap: Gap | None) -> str:
    if measured is None or gap is None:
        return "nothing was tried: no run of the chosen batch has measured its generalisation gap"
    smallest = measured.gaps[0]
    if gap == smallest:
        return f"nothing was tried: {_gap_of_batch(gap)}, and no smaller batch was trained to its end"
    return (
        f"nothing was tried: {_gap_of_batch(gap)}, and {gap_text(smallest.gap)} at the smallest batch ({smallest.effective_batch_size}), "
        f"so it is not wider by more than seeds vary ({f'{measured.deviation:.2g}'})"
    )


def _gap_of_batch(gap: Gap) -> str:
    return f"the generalisation gap is {gap_text(gap.gap)} at effective batch {gap.effective_batch_size}"


def _sentence(measured: Generalisation, gap: Gap, plain: Standing, findings: RegularizationFindings) -> str:
    smallest = measured.gaps[0]
    wider = f"{_gap_of_batch(gap)}, wider than the {gap_text(smallest.gap)} at {smallest.effective_batch_size}"
    if not findings.runs:
        return f"{wider}; no setting was trained to its end"
    assert findings.spread is not None, "a setting was trained to its end"
    gaps = [run.generalisation_gap for run in findings.runs]
    told = ["" if gap is None else f" (gap {gap_text(gap)})" for gap in gaps]
    tried = ", ".join(
        f"{run.setting} {loss_text(run.val_loss)}{gap}" for run, gap in zip(findings.runs, told, strict=True)
    )
    which = f"{findings.kept} is kept, as it" if findings.kept else "none of the settings"
    return (
        f"{wider}; {which} lowers the loss by more than seeds vary ({loss_text(findings.spread)}): val loss "
        f"{loss_text(plain.val_loss)} without; {tried}"
    )


def _notes(context: StageContext[Regularization], findings: RegularizationFindings) -> Iterator[str]:
    """Yield what could not be tried and why, and what a kept setting was not tried with."""
    stage, own = context.stage, _own(context)
    if stage.dropout and "dropout" not in own:
        yield f"dropout was not tried: {context.config.model.target} takes no argument of that name"
    if stage.label_smoothing and "label_smoothing" not in own:
        yield f"label smoothing was not tried: {_why_unsmoothed(context)}, not the built-in one from whole logits"
    if stage.weight_decay and context.config.optimizer.type == "own":
        yield f"weight decay was not tried: {context.config.optimizer.name} has its own, in optimizer.kwargs or its groups"
    elif stage.weight_decay and not own["weight_decay"]:
        yield "weight decay was not tried: optimizer.weight_decay is 0, which has no multiples"
    if findings.kept and context.config.real_run:
        yield f"the runs of several lengths (horizons) train without {findings.kept}"


def describe(context: StageContext[Regularization]) -> list[str]:
    stage = context.stage
    tried = {
        "dropout": ", ".join(f"{value:g}" for value in stage.dropout),
        "label smoothing": ", ".join(f"{value:g}" for value in stage.label_smoothing),
        "weight decay": ", ".join(f"x{value:g}" for value in stage.weight_decay),
    }
    named = "; ".join(f"{name} {values}" for name, values in tried.items() if values)
    return [f"where the chosen batch has a wider generalisation gap than the smallest: {named or 'nothing'}"]


def num_full_runs(context: StageContext[Regularization]) -> int:
    stage = context.stage
    return len(stage.dropout) + len(stage.label_smoothing) + len(stage.weight_decay)


def change(context: StageContext[Regularization]) -> Change | None:
    """Return the setting that is kept."""
    findings = found(context.study, RegularizationFindings)
    return findings.kept.change(findings.source) if findings and findings.kept else None


def figures(context: StageContext[Regularization]) -> list[Figure]:
    """Return the loss curves of the chosen run and of all settings."""
    if not context.trials():
        return []
    source = _source(context)
    deviation = loss_deviation(context.study, context.config.objective)
    kept = winner_of(context.study, RegularizationFindings)
    return loss_curves([source, *context.trials()], kept or source.id, deviation)


STAGE = Stage[Regularization](
    propose,
    conclude,
    describe,
    figures,
    TRAINING_COLUMNS,
    winner=lambda context: winner_of(context.study, RegularizationFindings),
    change=change,
    precedence=4,
    num_full_runs=num_full_runs,
    proposes_once=True,
)
