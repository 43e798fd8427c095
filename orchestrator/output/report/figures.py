"""Figures on the page: pictures whose values the page's script tells under the pointer, as a table and to the arrow keys."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

from pydantic import JsonValue

from batchscout.orchestrator.output.plots import element, plot
from batchscout.orchestrator.stages.figures import (
    AUXILIARY_COLOUR,
    COMPILING_COLOUR,
    OTHERS_COLOUR,
    Axis,
    Figure,
    Mark,
    Series,
)

_BAR_WIDTH = 260
_MOST_IN_WORDS = 2
"""So many points above each other are said and not drawn."""
TIME_COLOURS: Mapping[str, int] = {
    "training": OTHERS_COLOUR,
    "compiling": COMPILING_COLOUR,
    "the rest: start, data, evaluation, checkpoints": AUXILIARY_COLOUR,
}
"""Of the parts of a bar, in their order; those of the timeline."""


def figure_element(figure: Figure, place: str) -> Element:
    """Return the picture with its caption. place: where on the page it stands; with its name it is told from all others."""
    marks = [(one, mark) for one in figure.series for mark in one.marks]
    if 1 <= len(marks) <= _MOST_IN_WORDS and len({mark.x for _, mark in marks}) == 1 and not figure.cells:
        return element("p", _in_words(figure, marks), id=f"{place}-{figure.name}", class_="single")
    has_values = bool(figure.cells or marks)
    picture = element("div", element("div", plot(figure), class_="sheet"), class_="picture")
    unbounded = any(mark.high is not None and math.isinf(mark.high) for _, mark in marks)
    said = f"{figure.caption} An arrow: the interval has no upper end." if unbounded else figure.caption
    caption = element("figcaption", said) if said else None
    looks = {"class_": "chart" if has_values else None, "style": f"width:{figure.width}px"}
    return element("figure", picture, colour_key(figure.key), caption, id=f"{place}-{figure.name}", **looks)


def _in_words(figure: Figure, marks: Sequence[tuple[Series, Mark]]) -> str:
    """Return what a chart of points above each other would show."""
    what, _, unit = figure.y.label.partition(", ")
    at, _, unit_of_x = figure.x.label.partition(", ")
    told = "; ".join(
        _value_in_words(figure.y, unit, "" if what.endswith(series.label) else series.label, mark)
        for series, mark in marks
    )
    where = " ".join(filter(None, [at, figure.x.told(marks[0][1].x), unit_of_x]))
    return f"{what or 'value'}: {told}, at {where}. {figure.caption}"


def _value_in_words(axis: Axis, unit: str, name: str, mark: Mark) -> str:
    said = mark.text if mark.text.replace(" ", "").isalpha() else ""  # and not the number once more
    text = axis.precise or axis.text
    parts = [name, text(mark.y), unit, said]
    if mark.low is not None and mark.high is not None:
        high = text(mark.high) if math.isfinite(mark.high) else "no upper end"
        parts.append(f"(from {text(mark.low)} to {high})")
    return " ".join(filter(None, parts)) + (f", {mark.told}" if mark.told else "")


def colour_key(colours: Mapping[str, int]) -> Element | None:
    """Return what the colours stand for; None without any."""
    names = [element("span", element("i", class_=f"c{colour}"), name) for name, colour in colours.items()]
    return element("p", *names, class_="legend") if names else None


def json_element(values: JsonValue, **attributes: object) -> Element:
    """Return data for the script. No text in it can end the element."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return element("script", text, type="application/json", **attributes)


def time_bar(parts: Sequence[float], longest: float, told: str) -> Element:
    """Return the parts side by side, to the scale of the longest bar of the table."""
    scale = _BAR_WIDTH / max(longest, sum(parts), 1e-9)
    starts = [scale * sum(parts[:i]) for i in range(len(parts))]
    rects = [
        element("rect", x=round(start, 1), y=2, width=round(scale * part, 1), height=11, class_=f"c{colour}")
        for colour, start, part in zip(TIME_COLOURS.values(), starts, parts, strict=True)
    ]
    style = f"width:{_BAR_WIDTH}px;max-width:{_BAR_WIDTH}px"
    return element("svg", *rects, viewBox=f"0 0 {_BAR_WIDTH} 15", style=style, role="img", aria_label=told)
