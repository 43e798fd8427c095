"""Figures on the page: pictures whose values the page's script tells under the pointer, as a table and to the arrow keys."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

from pydantic import JsonValue

from batchscout.orchestrator.output.plots import element, plot
from batchscout.orchestrator.stages.figures import Figure, Mark, Series

_BAR_WIDTH = 260
TIME_COLOURS: Mapping[str, int] = {"training": 5, "compiling": 3, "the rest: start, data, evaluation, checkpoints": 6}
"""Of the parts of a bar, in their order; those of the timeline."""


def figure_element(figure: Figure, place: str) -> Element:
    """Return the picture with its caption. place: where on the page it stands; with its name it is told from all others."""
    marks = [(one, mark) for one in figure.series for mark in one.marks]
    if len(marks) == 1 and not figure.cells:
        return element("p", _in_words(figure, *marks[0]), id=f"{place}-{figure.name}", class_="single")
    has_values = bool(figure.cells or marks)
    picture = element("div", element("div", plot(figure), class_="sheet"), class_="picture")
    caption = element("figcaption", figure.caption) if figure.caption else None
    looks = {"class_": "chart" if has_values else None, "style": f"width:{figure.width}px"}
    return element("figure", picture, colour_key(figure.key), caption, id=f"{place}-{figure.name}", **looks)


def _in_words(figure: Figure, series: Series, mark: Mark) -> str:
    """Return what a chart of a single point would show."""
    name = f" of {series.label}" if series.label else ""
    ends = f", from {figure.y.told(mark.low)} to " if mark.low is not None and mark.high is not None else ""
    if ends and mark.high is not None:
        ends += figure.y.told(mark.high) if math.isfinite(mark.high) else "no upper end"
    said = f" {mark.text}" if mark.text.replace(" ", "").isalpha() else ""  # and not the number once more
    more = f"; {mark.told}" if mark.told else ""
    return f"{figure.y.label or 'value'}{name}: {figure.y.told(mark.y)}{said}{ends} ({figure.x.label} {figure.x.told(mark.x)}{more}). {figure.caption}"


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
