"""Shows a person how a running study gets on: stage, trials by state, the current best, time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import Equivalence, StageKeys
from batchscout.orchestrator.config.trial import uses_compile
from batchscout.orchestrator.decisions.observer import Observer
from batchscout.orchestrator.output.panel import Panel
from batchscout.orchestrator.output.shown import Terminal, shown
from batchscout.orchestrator.output.time_left import estimated_seconds_left, most_seconds_left, seconds_left
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.cost import Cost, cost_of, samples_per_second
from batchscout.orchestrator.stages.input_bound import INPUT_BOUND
from batchscout.orchestrator.stages.probing import num_full_runs
from batchscout.orchestrator.study.state import Conclusion, Study
from batchscout.orchestrator.study.trial import Metrics, Trial, TrialState
from batchscout.orchestrator.units import bytes_text, counted, gap_text, loss_text, rate_text, rho_text, seconds_text
from batchscout.trainers.notices import Notice


class Progress(Observer):
    """A live panel on a terminal; on a pipe or a log, one line per event."""

    def __init__(self, config: StudyConfig, study: Study, quiet: bool = False, began: float | None = None) -> None:
        """began: when the user's command did, by the monotonic clock; None: now."""
        self._config, self._study = config, study
        self._console = Terminal(quiet=quiet)
        self._stage: StageKeys | None = None
        """The stage that is shown; None before the first has begun."""
        self._latest: dict[str, Metrics] = {}
        """The last metrics heard of each trial that has not ended, journaled or not."""
        self._doing = ""
        self.so_far = ""
        """What the stage's trials speak for; empty where they say nothing yet."""
        self._began = time.monotonic() if began is None else began
        self._estimated: Cost | None = None
        """What the study takes, by the passes that were timed before anything was measured; None where none were."""
        self._started_at: dict[str, float] = {}
        """When each trial that runs was started."""
        self._heard_of: set[str] = set()
        """Those of them that have told something since."""
        self._most_full_runs = 0
        """The full runs that the study takes at most, as far as is known at the stage."""
        self._live = Panel(self._console, self.panel)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.__exit__(*exception)

    def say(self, text: str) -> None:
        """Show what is being done now."""
        self._doing = text
        if not self._console.is_terminal:
            self._console.print(shown(text))

    def stage_began(self, stage: StageKeys) -> None:
        self._stage, self.so_far = stage, ""
        self._most_full_runs = num_full_runs(self._config, self._study, self._num_lanes())
        self._estimated = None  # lanes have come to be known
        self.say(f"{stage.type}: {type(stage).__doc__}")

    def started(self, trial: Trial) -> None:
        self._started_at[trial.id] = time.monotonic()
        self._heard_of.discard(trial.id)
        self._event(trial)

    def progressed(self, trial: Trial, metrics: Metrics) -> None:
        self._heard_of.add(trial.id)
        self._latest[trial.id] = metrics

    def evaluated(self, trial: Trial, metrics: Metrics) -> None:
        self.progressed(trial, metrics)

    def waits(self, trial: Trial) -> None:
        self._started_at.pop(trial.id, None)
        self._event(trial)

    def ended(self, trial: Trial) -> None:
        self._started_at.pop(trial.id, None)
        self._latest.pop(trial.id, None)
        self._event(trial)
        self._look_again()

    def _look_again(self) -> None:
        """See what the stage's trials speak for now; a log is told where that has changed."""
        if self._stage is None:
            return
        before = self.so_far
        self.so_far = stage_of(self._stage).so_far(StageContext(self._stage, self._config, self._study))
        if self.so_far != before and not self._console.is_terminal:
            self._console.print(shown(f"  {self.so_far}"))

    def noticed(self, trial: Trial | None, notice: Notice) -> None:
        name = f"{trial.id}: " if trial else ""
        self._console.print(shown(f"  {name}{notice.text}", style="yellow"), soft_wrap=True)

    def concluded(self, conclusion: Conclusion) -> None:
        mark = "[green]done[/]" if conclusion.ok else "[red]failed[/]"
        self._console.print(f"{mark} [bold]{conclusion.stage}[/]: ", shown(conclusion.reason), sep="")
        for note in conclusion.notes:
            self._console.print_indented(note, 5, "dim")

    def _event(self, trial: Trial) -> None:
        """Print a line in a log; on a terminal the panel shows it."""
        if not self._console.is_terminal:
            self._console.print(shown(f"  {trial.id}: {trial.state}  {trial_line(trial, self._unit)}".rstrip()))

    @property
    def _unit(self) -> str:
        return self._study.facts.rate_unit

    def panel(self) -> RenderableType:
        """Return what a terminal shows now."""
        lines: list[RenderableType] = [self._stages(), shown(self._clock()), shown(self._doing, style="dim")]
        if self._stage is not None:
            trials = self._study.of_stage(self._stage.type)
            lines.append(self._running(trials))
            if self.so_far:
                lines.append(shown(self.so_far, style="cyan"))
            lines.append(self._counts(trials))
        if self._study.lanes_text:
            lines.append(shown(self._study.lanes_text, style="dim"))
        return Group(*lines)

    def _stages(self) -> Text:
        text = shown(f"{self._config.name}  ", style="bold")
        for stage in self._config.stages:
            mark, style = self._mark(stage)
            text.append(f"{mark} {stage.type}  ", style=style)
        return text

    def _mark(self, stage: StageKeys) -> tuple[str, str]:
        """Return (the sign before the stage's name, its style)."""
        conclusion = self._study.conclusions.get(stage.type)
        if conclusion is not None:
            return ("+", "green") if conclusion.ok else ("!", "red")
        return ("*", "bold yellow") if stage == self._stage else ("-", "dim")

    def _running(self, trials: Sequence[Trial]) -> Table:
        table = Table.grid(*(Column(overflow="fold") for _ in range(3)), padding=(0, 2))
        for trial in trials:
            if trial.state is TrialState.RUNNING:
                table.add_row(trial.id, *self._how_far(trial))
        return table

    def _how_far(self, trial: Trial) -> tuple[str, str]:
        """Return how far a running trial is, and its figures."""
        if (started_at := self._started_at.get(trial.id)) is not None and trial.id not in self._heard_of:
            doing = "builds and compiles its model" if trial.config.compile else "builds its model"
            return f"{doing}, {seconds_text(time.monotonic() - started_at)} so far", ""
        metrics = trial.metrics | self._latest.get(trial.id, {})
        seen = metrics.get("samples_seen") or 0
        return f"{seen:,.0f} of {trial.config.sample_budget:,} samples", trial_metrics(trial, metrics, self._unit)

    def _counts(self, trials: Sequence[Trial]) -> Text:
        counts = {state: sum(trial.state is state for trial in trials) for state in TrialState}
        parts = [f"{count} {state}" for state, count in counts.items() if count]
        best = best_so_far(self._stage, trials) if self._stage else None
        text = shown("trials: " + ", ".join(filter(None, [*parts, rungs_line(trials)])))
        if best:
            text.append(f"   best: {best.id} {trial_line(best, self._unit)}", style="cyan")
        return text

    def _clock(self) -> str:
        """Return how long it has taken, and what is left, as far as that can be said."""
        in_stage = seconds_left(self._study.of_stage(self._stage.type), self._latest) if self._stage else None
        parts = [f"{seconds_text(time.monotonic() - self._began)} so far"]
        parts += [f"{in_stage} left in this stage"] if in_stage else []
        in_all, estimated = most_seconds_left(self._study, self._most_full_runs), self._estimated_left()
        if in_all is not None:
            parts.append(f"at most {seconds_text(max(in_all, in_stage.high if in_stage else 0.0))} left")
        elif estimated:
            compiling = ", plus compiling" if uses_compile(self._config) else ""
            parts.append(f"about {seconds_text(estimated)} left, by estimate{compiling}")
        elif estimated is None and not in_stage:
            parts.append("the time left is not known yet")
        return ", ".join(parts)

    def _num_lanes(self) -> int:
        return max(self._study.most_lanes, self._config.placement.lanes or 1)

    def _estimated_left(self) -> float | None:
        """Return what is left by `plan`'s own estimate, and the pace of the full runs that have begun; None where no pass was timed."""
        facts = self._study.facts
        if facts.pass_seconds is None:
            return None
        if self._estimated is None:
            rate = samples_per_second(self._config, facts.pass_seconds)
            self._estimated = cost_of(self._config, facts, rate, self._num_lanes())
        now = time.monotonic()
        elapsed = {id: now - started_at for id, started_at in self._started_at.items()}
        return estimated_seconds_left(self._study, self._estimated, self._num_lanes(), self._latest, elapsed)


def best_so_far(stage: StageKeys, trials: Sequence[Trial]) -> Trial | None:
    """Return the full run with the lowest val loss, else the fastest trial. Of the splits of one batch none is better than another."""
    if isinstance(stage, Equivalence):
        return None
    with_loss = [trial for trial in trials if trial.is_full_run and trial.metric("val_loss") is not None]
    if with_loss:
        return min(with_loss, key=lambda trial: trial.measured("val_loss"))
    with_rate = [trial for trial in trials if trial.metric("tokens_per_second") is not None]
    return max(with_rate, key=lambda trial: trial.measured("tokens_per_second"), default=None)


def rungs_line(trials: Sequence[Trial]) -> str:
    """Return how many trials have come to each rung, and wait there; empty before any has. Rungs of trials with different budgets lie
    at the same shares of them, so they are counted by their number."""
    levels = [len(trial.rungs) for trial in trials]
    paused = [len(trial.rungs) for trial in trials if trial.state is TrialState.PAUSED]
    parts = []
    for level in range(1, max(levels, default=0) + 1):
        waiting = paused.count(level)
        there = f"rung {level} reached by {counted(sum(reached >= level for reached in levels), 'trial')}"
        parts.append(f"{there} ({waiting} waiting)" if waiting else there)
    return ", ".join(parts)


def trial_line(trial: Trial, rate_unit: str) -> str:
    """Return a trial's figures, or else its explanation; both if an earlier study has measured it, or an earlier try
    failed."""
    figures, explanation = trial_metrics(trial, trial.metrics, rate_unit), trial.explanation_beside_state
    both = trial.reused or trial.earlier_tries
    return "; ".join(filter(None, [figures, explanation])) if both else explanation or figures


def trial_metrics(trial: Trial, metrics: Metrics, rate_unit: str) -> str:
    """Return the metrics in a line, without the losses of a run of a few steps: it is there to be timed."""
    told = metrics if trial.config.evaluations else metrics | {"val_loss": None, "loss": None}
    return metrics_line(told, rate_unit)


def metrics_line(metrics: Mapping[str, float | None], rate_unit: str) -> str:
    """Return the metrics that people look at first; the training loss only where there is no validation loss. rate_unit: that of
    `tokens_per_second`."""
    known = {key: value for key, value in metrics.items() if value is not None}
    texts: dict[str, Callable[[float], str]] = {  # empty where the value is not worth any
        "val_loss": lambda loss: f"val loss {loss_text(loss)}",
        "loss": lambda loss: "" if "val_loss" in known else f"loss {loss_text(loss)}",
        "generalisation_gap": lambda gap: f"gap {gap_text(gap)}",
        "tokens_per_second": lambda rate: rate_text(rate, rate_unit),
        "data_wait": lambda share: f"{share:.0%} waiting for data" if share >= INPUT_BOUND / 2 else "",
        "peak_memory_bytes": bytes_text,
        "rho": lambda rho: f"rho {rho_text(rho)}",
    }
    return ", ".join(said for key, text in texts.items() if key in known and (said := text(known[key])))
