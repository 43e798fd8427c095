"""Where a picture has its texts, over all figures of the studies that the tests keep: nothing lies over what somebody is to read."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from xml.etree.ElementTree import Element

import pytest

from batchscout.orchestrator.output.plots import NUM_COLOURS, plot
from batchscout.orchestrator.output.report.gallery import all_figures
from batchscout.orchestrator.output.report.shell import text_of
from batchscout.orchestrator.stages.figures import Axis, Cell, Figure, Mark, Series
from tests.support.example_study import example_config, example_study
from tests.support.outcome import GOLDEN, RECORDED, kept_in
from tests.support.run_curves import example_curves

RUNS = [*sorted(GOLDEN.iterdir()), RECORDED, None]

Box = tuple[float, float, float, float]
"""left, top, right, bottom"""


def figures_of(run: Path | None) -> list[Figure]:
    config, study = kept_in(run) if run else (example_config(), example_study(example_config()))
    return [figure for _, figure in all_figures(config, study, [] if run else example_curves())]


def box_of(text: Element) -> Box:
    """Return the room of a text of 12 pixels in a font of usual width."""
    x, y, width = float(text.get("x", 0)), float(text.get("y", 0)), 6.5 * len(text.text or "")
    left = x - {"start": 0.0, "middle": width / 2, "end": width}[text.get("text-anchor", "start")]
    return left, y - 9, left + width, y + 2


def meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def leaders(svg: Element) -> list[Box]:
    """Return where the level parts of the lines lie that lead to names."""
    lines = [line for line in svg.iter("polyline") if line.get("class") == "leader"]
    ends = [[float(number) for number in re.findall(r"[\d.]+", line.get("points", ""))] for line in lines]
    return [(x1, y - 0.5, x2, y + 0.5) for x1, y, x2, *_ in ends]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name if run else "example")
def test_what_is_written_beside_a_mark_lies_on_no_axis_no_line_to_a_name_and_no_other_text(run: Path | None) -> None:
    drawn = [plot(figure) for figure in figures_of(run)]
    assert sum(len(svg.findall("text[@class='note']")) for svg in drawn) > 2
    for svg in drawn:
        notes = {box_of(text): text.text for text in svg.findall("text[@class='note']")}
        others = [box_of(text) for text in svg.iter("text") if text.get("class") != "note"]
        axis = max(float(line.get("y1", 0)) for line in svg.iter("line") if line.get("class") == "axis")
        covered = [text for box, text in notes.items() if any(meet(box, one) for one in [*others, *leaders(svg)])]
        assert covered == []
        left = min(float(line.get("x1", 0)) for line in svg.iter("line") if line.get("class") == "axis")
        assert [text for box, text in notes.items() if box[3] > axis - 4 or box[0] < left - 1] == [], "among the ticks"
        assert not any(meet(one, another) for one, another in itertools.combinations(notes, 2))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name if run else "example")
def test_what_is_written_beside_the_chosen_mark_is_never_left_out(run: Path | None) -> None:
    for figure in figures_of(run):
        chosen = [mark.text for one in figure.series for mark in one.marks if mark.kind == "chosen" and mark.text]
        written = [text.text for text in plot(figure).findall("text[@class='note']")]
        assert [text for text in chosen if text not in written] == []


def test_no_line_leads_across_cells_or_from_marks_that_no_line_joins() -> None:
    marks, axis = (Mark(1, 1), Mark(2, 2)), Axis("x")
    cell = Cell(0, 3, 0, 3, "a cell")
    joined, alone = Series("joined", marks), Series("alone", marks, 5, joined=False)
    assert len(leaders(plot(Figure("a", axis, axis, (joined, alone))))) == 1
    on_cells = plot(Figure("a", axis, axis, (joined, alone), cells=(cell,)))
    assert leaders(on_cells) == []
    names = [one for one in on_cells.iter("g") if "name" in one.get("class", "")]
    assert [one.find("path") is not None for one in names] == [True, True], "the shape of the marks tells them apart"


def test_every_colour_is_another_one_by_day_and_by_night() -> None:
    for palette in re.findall(r":root \{.*?\}", text_of("figure.css"), flags=re.S):
        colours = dict(re.findall(r"--(c\d+|decided|open): (#\w+)", palette))
        assert {*colours} == {*(f"c{number}" for number in range(NUM_COLOURS)), "decided", "open"}
        assert len({*colours.values()}) == len(colours)


def test_what_keeps_its_value_until_the_next_mark_is_drawn_in_steps() -> None:
    axis, marks = Axis("x"), (Mark(1, 3), Mark(2, 2), Mark(4, 1))
    svg = plot(Figure("a", axis, axis, (Series("", marks, steps=True),)))
    (line,) = svg.iter("polyline")
    points = [tuple(map(float, one.split(","))) for one in line.get("points", "").split()]
    assert len(points) == 5
    assert all(one[0] == other[0] or one[1] == other[1] for one, other in itertools.pairwise(points))
