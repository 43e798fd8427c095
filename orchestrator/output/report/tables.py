"""Tables of trials and of plain values, and their cells."""

from __future__ import annotations

import math
from typing import Any
from xml.etree.ElementTree import Element

from orchestrator.output.plots import element
from orchestrator.study.state import Study, Trial
from orchestrator.units import bytes_text

_CONFIG_COLUMNS = {
    "micro_batch_size": "micro-batch",
    "gradient_accumulation_steps": "accumulation",
    "effective_batch_size": "effective batch",
    "activation_checkpointing": "activation checkpointing",
    "compile": "compile",
    "precision": "precision",
    "learning_rate": "learning rate",
    "warmup_samples": "warm-up, samples",
    "seed": "seed",
}


_METRIC_COLUMNS = {
    "samples_seen": ("samples", "{:,.0f}", 1),
    "loss": ("loss", "{:.4f}", 1),
    "final_loss": ("final loss", "{:.6f}", 1),
    "val_loss": ("val loss", "{:.4f}", 1),
    "perplexity": ("perplexity", "{:,.2f}", 1),
    "tokens_per_second": ("tokens/s", "{:,.0f}", 1),
    "step_seconds": ("step, ms", "{:,.1f}", 1e-3),
    "peak_memory_bytes": ("peak memory, MiB", "{:,.0f}", 2**20),
    "predicted_memory_bytes": ("predicted, MiB", "{:,.0f}", 2**20),
    "mfu": ("MFU, %", "{:.1f}", 0.01),
    "hfu": ("HFU, %", "{:.1f}", 0.01),
    "coherence": ("coherence", "{:.3f}", 1),
    "coherence_floor": ("its floor", "{:.3f}", 1),
    "noise_scale": ("noise scale, samples", "{:,.1f}", 1),
    "noise_scale_low": ("low", "{:,.1f}", 1),
    "noise_scale_high": ("high", "{:,.1f}", 1),
    "goodput": ("goodput, relative", "{:.2f}", 1),
    "update_ratio": ("update / weights", "{:.1e}", 1),
    "rho": ("rho", "{:.1e}", 1),
    "train_seconds": ("training, s", "{:,.1f}", 1),
    "compile_seconds": ("compiling, s", "{:,.1f}", 1),
}


_MEMORY_AND_SPEED = ("tokens_per_second", "step_seconds", "peak_memory_bytes", "predicted_memory_bytes", "mfu", "hfu")


_NOISE = ("coherence", "coherence_floor", "noise_scale", "noise_scale_low", "noise_scale_high", "goodput")


_TRAINING = (
    "samples_seen", "val_loss", "perplexity", "update_ratio", "train_seconds", "tokens_per_second", "peak_memory_bytes",
)  # fmt: skip


_STAGE_METRICS = {
    "frontier": _MEMORY_AND_SPEED,
    "throughput": ("tokens_per_second", "step_seconds", *_NOISE),
    "equivalence": ("final_loss", "step_seconds", "tokens_per_second", "mfu", "rho"),
    "train": _TRAINING,
    "learning_rate": _TRAINING,
    "grid": _TRAINING,
}


def trials_table(study: Study, stage: str, trials: list[Trial]) -> Element:
    """What varies and what was measured; what all trials share stands above."""
    varying = [key for key in _CONFIG_COLUMNS if len({getattr(t.config, key) for t in trials}) > 1]
    metrics = {trial.id: metrics_with_goodput(study, trial) for trial in trials}
    measured = [key for key in _STAGE_METRICS[stage] if any(finite(m.get(key)) is not None for m in metrics.values())]
    headers = ["trial", "state", *[_CONFIG_COLUMNS[key] for key in varying]]
    headers += [_METRIC_COLUMNS[key][0] for key in measured] + ["lane, s"]
    best = study.value(stage, "winner")
    rows = []
    for trial in trials:
        cells = [config_text(getattr(trial.config, key)) for key in varying]
        cells += [_metric_text(key, metrics[trial.id].get(key)) for key in measured]
        rows += _trial_rows(trial, [*cells, f"{trial.seconds:,.1f}"], trial.id == best)
    shared = [f"{_CONFIG_COLUMNS[key]} {config_text(getattr(trials[0].config, key))}" for key in _SHARED - set(varying)]
    return element(
        "div",
        element("p", "In all trials: " + ", ".join(sorted(shared)) + "." if shared else "", class_="muted"),
        html_table(headers, rows, "numbers"),
    )


def _trial_rows(trial: Trial, cells: list[str], best: bool) -> list[Element]:
    """The numbers, and under them, over the whole width, the reason."""
    names = [name for name, wanted in (("best", best), ("explained", bool(trial.reason))) if wanted]
    numbers = element(
        "tr",
        element("td", element("code", trial.id), element("small", trial.role) if trial.role else None),
        element("td", element("span", trial.state.replace("_", " "), class_=f"state {trial.state}")),
        *[number_cell(cell) for cell in cells],
        class_=" ".join(names),
    )
    reason = element("tr", element("td", trial.reason, colspan=2 + len(cells), class_="reason"))
    return [numbers, reason] if trial.reason else [numbers]


_SHARED = set(_CONFIG_COLUMNS) - {"warmup_samples"}


def metrics_with_goodput(study: Study, trial: Trial) -> dict[str, Any]:
    """The trial's metrics, and the goodput that the throughput stage made of them."""
    goodput = study.value(trial.stage, "goodput", {}).get(str(trial.config.effective_batch_size))
    return trial.metrics | ({"goodput": goodput} if goodput is not None else {})


def facts_table(facts: list[tuple[str, Any]]) -> Element:
    rows = [element("tr", element("th", key), _value_cell(key, value)) for key, value in facts]
    return element("table", element("tbody", *rows), class_="facts")


def _value_cell(key: str, value: Any) -> Element:
    return element("td", value_element(key, value), class_="number" if isinstance(value, (int, float)) else None)


def value_element(key: str, value: Any) -> Element:
    """A recommendation's value, whatever its shape."""
    if isinstance(value, dict):
        return facts_table(list(value.items()))
    if isinstance(value, (list, tuple)):
        return _list(list(value))
    number = finite(value) if key.endswith("_bytes") else None
    return element("span", config_text(value) if number is None else bytes_text(number))


def _list(values: list[Any]) -> Element:
    if not all(isinstance(value, dict) for value in values):
        return element("ul", *[element("li", value_element("", value)) for value in values])
    keys = list(dict.fromkeys(key for value in values for key in value))
    rows = [element("tr", *[_value_cell(key, value.get(key)) for key in keys]) for value in values]
    return html_table(keys, rows)


def config_text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _metric_text(key: str, value: Any) -> str:
    _, pattern, unit = _METRIC_COLUMNS[key]
    number = finite(value)
    if number is None:
        return "not available" if key == "noise_scale" else "-"
    return pattern.format(number / unit)


def finite(value: Any) -> float | None:
    """The number, or None for what is missing, null or not finite."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def short_id(trial: Trial) -> str:
    """The trial's id without its stage."""
    return trial.id.removeprefix(f"{trial.stage}-")


def number_cell(text: str) -> Element:
    return element("td", text, class_="number")


def html_table(headers: list[str], rows: list[Element], kind: str = "") -> Element:
    head = element("thead", element("tr", *[element("th", header) for header in headers]))
    return element("div", element("table", head, element("tbody", *rows), class_=kind), class_="scroll")
