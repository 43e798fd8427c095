"""What a person sees while a study runs: stage, trials by state, the current best, time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orchestrator.config.keys import StudyConfig
from orchestrator.study.state import Conclusion, Study, Trial, TrialState
from orchestrator.units import bytes_text, seconds_text


class Progress:
    """A live panel on a terminal; on a pipe or a log, one line per event."""

    def __init__(self, config: StudyConfig, study: Study, quiet: bool = False) -> None:
        self._config, self._study = config, study
        self._console = Console(quiet=quiet, highlight=False)
        self._director: Any = None
        self._doing = ""
        self._started = time.monotonic()
        self._said: dict[str, TrialState] = {trial.id: trial.state for trial in study.trials.values()}
        self._live = Live(get_renderable=self._panel, console=self._console, refresh_per_second=2, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def say(self, text: str) -> None:
        self._doing = text
        if not self._console.is_terminal:
            self._console.print(text)

    def watch(self, director: Any) -> None:
        """Show this stage from now on."""
        self._director = director
        director.on_change = self._event
        self.say(f"{director.stage.type}: {type(director.stage).__doc__}")

    def concluded(self, conclusion: Conclusion) -> None:
        mark = "[green]done[/]" if conclusion.ok else "[red]failed[/]"
        self._console.print(f"{mark} [bold]{conclusion.stage}[/]: ", Text(conclusion.reason), sep="")
        for note in conclusion.notes:
            self._console.print(Text(f"     {note}", style="dim"))

    def _event(self, trial: Trial) -> None:
        """A trial changed its state: a line in a log, nothing on a terminal, where the panel shows it."""
        if not self._console.is_terminal:
            self._console.print(Text(f"  {trial.id}: {trial.state}  {trial_line(trial)}".rstrip()))

    def _panel(self) -> RenderableType:
        lines: list[RenderableType] = [self._stages(), Text(self._doing, style="dim")]
        if self._director is not None:
            lines += [self._running(), self._counts()]
        return Group(*lines)

    def _stages(self) -> Text:
        text = Text(f"{self._config.name}  ", style="bold")
        for stage in self._config.stages:
            done = stage.type in self._study.conclusions
            current = self._director is not None and self._director.stage.type == stage.type and not done
            style = "green" if done else "bold yellow" if current else "dim"
            failed = done and not self._study.conclusions[stage.type].ok
            mark = "! " if failed else "* " if current else "+ " if done else "- "
            text.append(mark + stage.type + "  ", style="red" if failed else style)
        return text

    def _running(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for trial in list(self._study.of_stage(self._director.stage.type)):
            if trial.state is TrialState.RUNNING:
                metrics = trial.metrics | self._director.latest.get(trial.id, {})
                seen = metrics.get("samples_seen", 0)
                table.add_row(
                    trial.id, f"{seen:,.0f} of {trial.config.sample_budget:,} samples", trial_metrics(trial, metrics)
                )
        return table

    def _counts(self) -> Text:
        trials = list(self._study.of_stage(self._director.stage.type))
        counts = {state: sum(trial.state is state for trial in trials) for state in TrialState}
        parts = [f"{count} {state}" for state, count in counts.items() if count]
        best = best_so_far(trials)
        text = Text("trials: " + ", ".join(parts))
        if best:
            text.append(f"   best: {best.id} {trial_line(best)}", style="cyan")
        text.append(f"   {seconds_text(time.monotonic() - self._started)} so far")
        left = seconds_left(trials)
        if left is not None:
            text.append(f", about {seconds_text(left)} left in this stage")
        return text


def best_so_far(trials: list[Trial]) -> Trial | None:
    """The lowest val loss of the full runs, else the most tokens/s."""
    with_loss = [t for t in trials if t.config.evaluations and t.metrics.get("val_loss") is not None]
    if with_loss:
        return min(with_loss, key=lambda trial: trial.metrics["val_loss"])
    with_rate = [trial for trial in trials if trial.metrics.get("tokens_per_second") is not None]
    return max(with_rate, key=lambda trial: trial.metrics["tokens_per_second"], default=None)


def seconds_left(trials: list[Trial]) -> float | None:
    """From the mean of the trials of this stage that ended; None before the first has."""
    ended = [trial.seconds for trial in trials if trial.state.ended and trial.seconds]
    open_trials = sum(not trial.state.ended for trial in trials)
    return open_trials * sum(ended) / len(ended) if ended else None


def trial_line(trial: Trial) -> str:
    """What a trial's end says in a line: its figures, or why there are none; both of one that was measured before."""
    figures = trial_metrics(trial, trial.metrics)
    return "; ".join(filter(None, [figures, trial.reason])) if trial.reused else trial.reason or figures


def trial_metrics(trial: Trial, metrics: dict[str, float]) -> str:
    """Without the losses of a run of a few steps: it is there to be timed."""
    return metrics_line(metrics if trial.config.evaluations else metrics | {"val_loss": None, "loss": None})


def metrics_line(metrics: Mapping[str, float | None]) -> str:
    known = {key: value for key, value in metrics.items() if value is not None}
    parts = [text(known[key]) for key, text in _IN_A_LINE.items() if key in known]
    if "val_loss" not in known and "loss" in known:
        parts.insert(0, f"loss {known['loss']:.3f}")
    return ", ".join(parts)


_IN_A_LINE: dict[str, Callable[[float], str]] = {
    "val_loss": "val loss {:.3f}".format,
    "tokens_per_second": "{:,.0f} tokens/s".format,
    "peak_memory_bytes": bytes_text,
    "rho": "rho {:.1e}".format,
}
