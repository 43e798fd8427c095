"""Two studies beside each other, as a page: what was different between them, and whether their answers are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from orchestrator.config.keys import StudyConfig
from orchestrator.output.plots import element
from orchestrator.output.recommendation import Recommendation
from orchestrator.output.report.figures import figure_element
from orchestrator.output.report.pieces import within
from orchestrator.output.report.setting import setting
from orchestrator.output.report.shell import page
from orchestrator.output.report.tables import config_text, html_table
from orchestrator.stages.figures import Axis, Figure, Mark, Series, time_axis
from orchestrator.stages.findings import found
from orchestrator.stages.train import TrainFindings
from orchestrator.study.state import Study
from orchestrator.units import bytes_text, number_text
from trainers.files import written_whole

ANSWER = (
    "micro_batch_size", "micro_batch_tokens", "gradient_accumulation_steps", "world_size", "effective_batch_size",
    "activation_checkpointing", "compile",
    "precision", "cross_entropy", "memory_knobs", "learning_rate", "warmup_samples", "ramp", "model_changes", "p_best", "expected_regret",
)  # fmt: skip
MEASURED = ("val_loss", "tokens_per_second", "peak_memory_bytes", "train_seconds", "noise_scale")


@dataclass(frozen=True)
class Side:
    """One of the two studies."""

    label: str
    """What it is called beside the other."""
    config: StudyConfig
    study: Study
    recommendation: Recommendation | None


def write_comparison(path: Path, first: Side, second: Side) -> None:
    """Write the page whole or not at all."""
    with written_whole(path) as file:
        for piece in comparison(first, second):
            file.write(piece.encode("utf-8", "replace"))


def comparison(first: Side, second: Side) -> Iterator[str]:
    """Return the page in pieces."""
    figures = [figure_element(figure, "compared") for figure in (_losses(first, second), *_batches(first, second))]
    body = within(
        element("main"),
        element("p", "batchscout", class_="muted"),
        element("h1", f"{first.label} and {second.label}"),
        within(
            element("section", id="answers"),
            element("p", agreement(first, second), class_="verdict"),
            element("p", element("b", f"{first.label}: "), _verdict(first)),
            element("p", element("b", f"{second.label}: "), _verdict(second)),
            _table("The answers", _answers(first), _answers(second), first, second),
        ),
        element("section", element("h2", "The losses"), element("div", *figures, class_="plots"), id="losses"),
        within(
            element("section", id="changes"),
            element("h2", "What else differs", element("span", "What is not listed is the same.", class_="question")),
            _table("The machine and the data", _machine(first), _machine(second), first, second),
            _table("The study files", keys_of(first.config), keys_of(second.config), first, second),
        ),
    )
    return page(f"{first.label} and {second.label}: batchscout", body)


def agreement(first: Side, second: Side) -> str:
    """Return whether the two recommend the same, in a sentence."""
    one, other = first.recommendation, second.recommendation
    if one is None or other is None:
        without = " and ".join(side.label for side in (first, second) if side.recommendation is None)
        return f"There is nothing to compare yet: no recommendation in {without}."
    changed = [key for key in ANSWER[:-2] if _answers(first).get(key) != _answers(second).get(key)]
    if not changed:
        return "Both recommend the same."
    batch = (
        f"the effective batch goes from {one.effective_batch_size} to {other.effective_batch_size}"
        if one.effective_batch_size != other.effective_batch_size
        else f"the effective batch stays {one.effective_batch_size}"
    )
    rate = (
        f"the learning rate from {one.learning_rate:.3g} to {other.learning_rate:.3g}"
        if one.learning_rate != other.learning_rate
        else f"the learning rate stays {one.learning_rate:.3g}"
    )
    return f"The answer differs: {batch}, {rate}. {_doubt(one, other)}".strip()


def _doubt(one: Recommendation, other: Recommendation) -> str:
    """Return why the difference of the batches need not mean anything; nothing where it does."""
    batches = {one.effective_batch_size, other.effective_batch_size}
    open_in_both = batches <= {*one.undecided_between} and batches <= {*other.undecided_between}
    return "Neither study could tell these two batches apart." if len(batches) == 2 and open_in_both else ""


def _verdict(side: Side) -> str:
    return side.recommendation.verdict if side.recommendation else "no recommendation"


def _answers(side: Side) -> dict[str, JsonValue]:
    if side.recommendation is None:
        return {}
    values = side.recommendation.to_json()
    evidence = values["evidence"]
    assert isinstance(evidence, dict)
    return {key: values.get(key) for key in ANSWER} | {key: evidence.get(key) for key in MEASURED}


def _machine(side: Side) -> dict[str, JsonValue]:
    return {name: text for name, text in setting(side.config, side.study).items() if name != "run"}


def keys_of(config: StudyConfig) -> dict[str, JsonValue]:
    """Return every key of a study file by its path, such as `optimizer.lr`; a stage's begin with its type."""
    tree = config.model_dump(mode="json")
    tree["stages"] = {stage["type"]: {k: v for k, v in stage.items() if k != "type"} for stage in tree["stages"]}
    return dict(_flat(tree, ""))


def _flat(tree: Mapping[str, JsonValue], path: str) -> Iterator[tuple[str, JsonValue]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _table(
    title: str, one: Mapping[str, JsonValue], other: Mapping[str, JsonValue], first: Side, second: Side
) -> Iterator[str]:
    """Return a row for everything that is not the same on both sides."""
    keys = [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]
    if not keys:
        return within(element("p", f"{title}: no difference.", class_="muted"))
    rows = [
        element("tr", element("td", key), *[element("td", _text(key, side.get(key))) for side in (one, other)])
        for key in keys
    ]
    return within(element("div"), element("h3", title), html_table(["", first.label, second.label], rows))


def _text(key: str, value: JsonValue) -> str:
    if isinstance(value, list):
        return ", ".join(map(config_text, value)) or "-"
    if isinstance(value, (int, float)) and key.endswith(("_bytes", "memory_limit")):
        return bytes_text(value)
    return config_text(value)


def _losses(first: Side, second: Side) -> Figure:
    """Return the validation loss of both recommended runs over the time trained."""
    curves = [_curve(side, colour) for colour, side in enumerate((first, second))]
    longest = max((mark.x for curve in curves for mark in curve.marks), default=0.0)
    return Figure(
        "losses", time_axis("training time", longest), Axis("validation loss"), tuple(curves), "The recommended runs."
    )


def _curve(side: Side, colour: int) -> Series:
    trial = side.study.trials.get(side.recommendation.evidence.trial) if side.recommendation else None
    points = [(point.get("train_seconds"), point.get("val_loss")) for point in (trial.history if trial else ())]
    marks = tuple(Mark(x, y) for x, y in points if x is not None and y is not None)
    return Series(side.label, marks, colour)


def _batches(first: Side, second: Side) -> list[Figure]:
    """Return what each batch comes to in either study; nothing where neither compared batches."""
    series = tuple(_by_batch(side, colour) for colour, side in enumerate((first, second)))
    batches = {mark.x for one in series for mark in one.marks}
    if not batches:
        return []
    x_axis = Axis("effective batch, samples", log=True, ticks=tuple(sorted(batches)))
    caption = "What each batch comes to at equal cost and its own best learning rate, with its 90 % interval."
    return [Figure("batches", x_axis, Axis("validation loss, or seconds to the target"), series, caption)]


def _by_batch(side: Side, colour: int) -> Series:
    findings = found(side.study, TrainFindings)
    marks = tuple(
        Mark(
            float(one.effective_batch_size),
            one.score,
            low=one.score_low,
            high=one.score_high,
            told=f"best learning rate {number_text(one.learning_rate)}, P(best) {one.p_best:.2f}",
        )
        for one in (findings.batches if findings else ())
    )
    return Series(side.label, marks, colour)


def labels(first: Path, second: Path) -> tuple[str, str]:
    """Return the names of two run directories, with as much of their paths as tells them apart."""
    one, other = first.absolute().parts, second.absolute().parts
    length = 1
    while one[-length:] == other[-length:] and length < max(len(one), len(other)):
        length += 1
    return "/".join(one[-length:]), "/".join(other[-length:])
