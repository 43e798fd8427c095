"""Two studies beside each other, as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from batchscout.orchestrator.output.comparison import Difference, Side, compared
from batchscout.orchestrator.output.plots import element
from batchscout.orchestrator.output.report.figures import figure_element
from batchscout.orchestrator.output.report.pieces import within
from batchscout.orchestrator.output.report.shell import page
from batchscout.orchestrator.output.report.tables import heading, html_table
from batchscout.orchestrator.stages.curves import loss_axis
from batchscout.orchestrator.stages.figures import CATEGORIES, Axis, Figure, Mark, Series, time_axis
from batchscout.orchestrator.stages.train import trained
from batchscout.orchestrator.units import number_text, probability_text
from batchscout.trainers.files import written_whole


def write_comparison(path: Path, first: Side, second: Side) -> None:
    """Write the page whole or not at all."""
    with written_whole(path) as file:
        for piece in comparison(first, second):
            file.write(piece.encode("utf-8", "replace"))


def comparison(first: Side, second: Side) -> Iterator[str]:
    """Return the page in pieces."""
    both = compared(first, second)
    figures = [figure_element(figure, "compared") for figure in (_losses(first, second), *_batches(first, second))]
    body = within(
        element("main"),
        element("p", "batchscout", class_="muted"),
        element("h1", f"{first.label} and {second.label}"),
        within(
            element("section", id="answers"),
            element("p", both.agreement, class_="verdict"),
            *[element("p", element("b", f"{side.label}: "), side.verdict) for side in (first, second)],
            _table("The answers", both.answers, both.labels),
        ),
        element("section", element("h2", "The losses"), element("div", *figures, class_="plots"), id="losses"),
        within(
            element("section", id="changes"),
            heading("What else differs", "What is not listed is the same."),
            _table("The machine and the data", both.machine_and_data, both.labels),
            _table("The study files", both.study_files, both.labels),
        ),
    )
    return page(f"{first.label} and {second.label}: batchscout", body)


def _table(title: str, differences: Sequence[Difference], labels: tuple[str, str]) -> Iterator[str]:
    """Return a row for everything that is not the same on both sides."""
    if not differences:
        return within(element("p", f"{title}: no difference.", class_="muted"))
    rows = [element("tr", element("td", one.name), *[element("td", text) for text in one.texts]) for one in differences]
    return within(element("div"), element("h3", title), html_table(["", *labels], rows))


def _losses(first: Side, second: Side) -> Figure:
    """Return the validation loss of both recommended runs over the time trained."""
    curves = [_curve(side, colour) for colour, side in zip(CATEGORIES, (first, second), strict=False)]
    longest = max((mark.x for curve in curves for mark in curve.marks), default=0.0)
    y_axis, cut = loss_axis([[mark.y for mark in curve.marks] for curve in curves])
    said = f"The recommended runs, and for a longer real run the study's own that is most like it.{cut}"
    return Figure("losses", time_axis("training time", longest), y_axis, tuple(curves), said)


def _curve(side: Side, colour: int) -> Series:
    trial = side.study.trials.get(side.recommendation.evidence.trial) if side.recommendation else None
    marks = tuple(Mark(x, loss) for x, loss in trial.curve("train_seconds")) if trial else ()
    return Series(side.label, marks, colour)


def _batches(first: Side, second: Side) -> list[Figure]:
    """Return what each batch comes to in either study; nothing where neither compared batches."""
    series = tuple(_by_batch(side, colour) for colour, side in zip(CATEGORIES, (first, second), strict=False))
    batches = {mark.x for one in series for mark in one.marks}
    if not batches:
        return []
    x_axis = Axis("effective batch, samples", log=True, ticks=tuple(sorted(batches)))
    caption = "What each batch comes to at equal cost and its own best learning rate, with its 90 % interval."
    scores = {
        "seconds to the target loss" if one.config.objective == "target" else "validation loss"
        for one in (first, second)
    }
    return [Figure("batches", x_axis, Axis(" and ".join(sorted(scores))), series, caption)]


def _by_batch(side: Side, colour: int) -> Series:
    findings = trained(side.study)
    marks = tuple(
        Mark(
            float(one.effective_batch_size),
            one.score,
            low=one.score_low,
            high=one.score_high,
            told=f"best learning rate {number_text(one.learning_rate)}, P(best) {probability_text(one.p_best)}",
        )
        for one in (findings.batches if findings else ())
    )
    return Series(side.label, marks, colour)
