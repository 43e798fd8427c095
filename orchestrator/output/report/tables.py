"""Tables of trials and of plain values, and their cells."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from xml.etree.ElementTree import Element

from pydantic import JsonValue

from batchscout.orchestrator.config.mode import mode_of
from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.output.plots import element
from batchscout.orchestrator.output.report.figures import json_element
from batchscout.orchestrator.output.report.pieces import each, within
from batchscout.orchestrator.output.status import state_text
from batchscout.orchestrator.output.time_split import held_seconds
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.figures import batch_text
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Metrics, Trial
from batchscout.orchestrator.units import bytes_text, counted, loss_text, probability_text
from batchscout.trainers.metrics import metric_of

_CONFIG_COLUMNS = {
    "batch": "batch (micro-batch x accumulation)",
    "activation_checkpointing": "activation checkpointing",
    "cross_entropy": "cross-entropy",
    "compile": "compile",
    "precision": "precision",
    "learning_rate": "learning rate",
    "warmup_samples": "warm-up, samples",
    "seed": "seed",
}


MOST_UNFOLDED, MOST_WRITTEN = 12, 200
"""A table of more trials is folded; one of more yet is not written out, as 10,000 rows of it took 16 MB."""
MOST_ROWS = 100
"""A table of alternatives has at most so many: all trials stand in their stage's own table."""


def _heading(metric: str, rate_unit: str) -> str:
    if metric == "tokens_per_second":
        return rate_unit
    heading = metric_of(metric).headline or metric.replace("_", " ")
    # No line begins with a slash, or ends before a short unit.
    return heading.replace(" / ", "\xa0/ ").replace(", ", ",\xa0")


def _metric_text(metric: str, value: float | None) -> str:
    if value is None:
        return "not available" if metric == "noise_scale" else "-"
    return metric_of(metric).number(value)


def trials_table(context: StageContext[StageKeys], trials: Sequence[Trial], *, is_driven: bool) -> Iterator[str]:
    """Yield a row for each trial of a stage with what varies and what was measured; a line above says what all share. is_driven: True if a
    process runs the study now."""
    stage = stage_of(context.stage)

    def figures(trial: Trial) -> Metrics:
        return trial.metrics | stage.derived(context, trial)

    varying = [key for key in _CONFIG_COLUMNS if len({_setting(trial, key) for trial in trials}) > 1]
    measured = _measured(stage.columns, map(figures, trials))
    unit = context.study.facts.rate_unit
    headers = [*(_CONFIG_COLUMNS[key] for key in varying), *(_heading(key, unit) for key in measured)]

    def cells(trial: Trial) -> list[str]:
        found = figures(trial)
        settings = [config_text(_setting(trial, key)) for key in varying]
        return [*settings, *(_metric_text(key, found.get(key)) for key in measured)]

    shared = _shared_text(trials[0], _SHARED - set(varying))
    is_open = len(trials) <= MOST_UNFOLDED
    return _rows_of(
        context.study, trials, headers, cells, {stage.winner(context)}, shared, is_open=is_open, is_driven=is_driven
    )


_OF_ALL = ("samples_seen", "val_loss", "tokens_per_second", "step_seconds", "peak_memory_bytes", "mfu")
"""The metrics that trials of several stages have."""


def all_trials_table(contexts: Sequence[StageContext[StageKeys]], *, is_driven: bool) -> Iterator[str]:
    """Yield a row for each trial of all stages, to be sorted and filtered together, with what most stages measure."""
    trials = [trial for context in contexts for trial in context.trials()]
    measured = _measured(_OF_ALL, (trial.metrics for trial in trials))
    headings = [_heading(key, contexts[0].study.facts.rate_unit) for key in measured]
    winners = {stage_of(context.stage).winner(context) for context in contexts}

    def cells(trial: Trial) -> list[str]:
        settings = (config_text(_setting(trial, key)) for key in ("batch", "learning_rate"))
        return [trial.stage, *settings, *(_metric_text(key, trial.metrics.get(key)) for key in measured)]

    headers = ["stage", _CONFIG_COLUMNS["batch"], _CONFIG_COLUMNS["learning_rate"], *headings]
    said = "What a stage chose is in bold."
    return _rows_of(contexts[0].study, trials, headers, cells, winners, said, is_open=False, is_driven=is_driven)


def _rows_of(
    study: Study,
    trials: Sequence[Trial],
    headers: Sequence[str],
    cells: Callable[[Trial], list[str]],
    winners: Collection[str | None],
    told: str,
    *,
    is_open: bool,
    is_driven: bool,
) -> Iterator[str]:
    """Yield a row for each trial: its id, its state, the cells and its lane time.

    Rows beyond MOST_WRITTEN are data, of which the script makes rows where someone looks for them.
    """

    def row(trial: Trial) -> tuple[Trial, str, list[str], bool]:
        state = state_text(trial.state, is_driven=is_driven)
        return trial, state, [*cells(trial), f"{held_seconds(study, trial):,.1f}"], trial.id in winners

    written = (one for trial in trials[:MOST_WRITTEN] for one in _trial_rows(*row(trial)))
    others = [_row_values(*row(trial)) for trial in trials[MOST_WRITTEN:]]
    head = _table_head(["trial", "state", *headers, "lane, s"])
    table = within(element("table", class_="numbers sortable"), head, within(element("tbody"), each(written)))
    return within(
        element("details", class_="table", **({"open": "open"} if is_open else {})),
        element("summary", counted(len(trials), "trial")),
        element("p", told, class_="muted"),
        within(element("div", class_="scroll"), table, *_more_rows(others)),
    )


def _setting(trial: Trial, key: str) -> object:
    if key == "batch":
        return batch_text(trial.config)
    return mode_of(trial.config).cross_entropy if key == "cross_entropy" else getattr(trial.config, key)


def _row_values(trial: Trial, state: str, cells: list[str], best: bool) -> list[JsonValue]:
    """Return what `_trial_rows` writes, as data."""
    return [trial.id, trial.role, state, trial.explanation_beside_state, best, *cells]


def _more_rows(rows: Sequence[JsonValue]) -> list[Element]:
    if not rows:
        return []
    without_script = f"And {len(rows):,} more, which this page shows where scripts run; batchscout status lists all."
    return [json_element(list(rows), class_="rows"), element("noscript", element("p", without_script))]


def _measured(columns: Iterable[str], found: Iterable[Metrics]) -> list[str]:
    """Return the columns for which any trial has a figure."""
    known = {key for figures in found for key, value in figures.items() if value is not None}
    return [key for key in columns if key in known]


_SHARED = set(_CONFIG_COLUMNS) - {"warmup_samples"}


def _shared_text(trial: Trial, keys: Collection[str]) -> str:
    # A cross-entropy that is computed as usual goes without saying: most models know no other.
    told = [key for key in keys if (key, _setting(trial, key)) != ("cross_entropy", "whole")]
    names = _CONFIG_COLUMNS | {"batch": "batch"}
    shared = sorted(f"{names[key]} {config_text(_setting(trial, key))}" for key in told)
    return f"In all trials: {', '.join(shared)}." if shared else ""


def _trial_rows(trial: Trial, state: str, cells: list[str], best: bool) -> list[Element]:
    """Return the row of numbers, and if there is an explanation a second row with it, over the whole width."""
    why = trial.explanation_beside_state
    names = [name for name, wanted in (("best", best), ("explained", bool(why))) if wanted]
    numbers = element(
        "tr",
        element("td", element("code", trial.id), element("small", trial.role) if trial.role else None),
        element("td", element("span", state.replace("_", " "), class_=f"state {state}")),
        *[number_cell(cell) for cell in cells],
        class_=" ".join(names),
    )
    reason = element("tr", element("td", why, colspan=2 + len(cells), class_="reason"))
    return [numbers, reason] if why else [numbers]


def facts_table(facts: Mapping[str, JsonValue]) -> Element:
    rows = [element("tr", element("th", key, scope="row"), _value_cell(key, value)) for key, value in facts.items()]
    return element("table", element("tbody", *rows), class_="facts")


def _value_cell(key: str, value: JsonValue) -> Element:
    return element("td", value_element(key, value), class_="number" if isinstance(value, (int, float)) else None)


def value_element(key: str, value: JsonValue) -> Element:
    """Return a value of recommendation.json, whatever its shape; bytes, losses and probabilities are written as people read them."""
    if isinstance(value, dict):
        return facts_table(value)
    if isinstance(value, list):
        return _list_element(value)
    if isinstance(value, (int, float)) and key.endswith("_bytes"):
        return element("span", bytes_text(value))
    if isinstance(value, float) and key == "p_best":
        return element("span", probability_text(value))
    if isinstance(value, float) and key.endswith("loss"):
        return element("span", loss_text(value))
    return element("span", config_text(value))


def _list_element(values: Sequence[JsonValue]) -> Element:
    """Return a table where all members have keys, else a list."""
    rows = [value for value in values if isinstance(value, dict)]
    if len(rows) < len(values):
        return element("ul", *[element("li", value_element("", value)) for value in values])
    keys = list(dict.fromkeys(key for row in rows for key in row))
    shown = [element("tr", *[_value_cell(key, row.get(key)) for key in keys]) for row in rows[:MOST_ROWS]]
    if len(rows) > MOST_ROWS:
        more = f"and {len(rows) - MOST_ROWS:,} more, in recommendation.json"
        shown.append(element("tr", element("td", more, colspan=len(keys), class_="reason")))
    return html_table(keys, shown)


def config_text(value: object) -> str:
    """Return a value of a configuration as it would stand in a study file; large numbers with commas."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        digits = 6 if 0.9 < abs(value) < 1 else 3  # a beta of 0.9998 is not 1
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
    return str(value)


def heading(title: str, question: str) -> Element:
    """Return the title of a section, with what the section answers."""
    return element("h2", title, element("span", question, class_="question"))


def notes_list(notes: Iterable[str]) -> Element | None:
    """Return the notes one below the other; None without any."""
    items = [element("li", note) for note in notes]
    return element("ul", *items, class_="notes") if items else None


def number_cell(text: str) -> Element:
    return element("td", text, class_="number")


def html_table(headers: list[str], rows: list[Element], kind: str = "") -> Element:
    table = element("table", _table_head(headers), element("tbody", *rows), class_=kind)
    return element("div", table, class_="scroll")


def _table_head(headers: list[str]) -> Element:
    return element("thead", element("tr", *[element("th", header, scope="col") for header in headers]))
