"""Figures on the page: a static picture first, and beside it the values from which the script draws it anew."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

from pydantic import JsonValue

from batchscout.orchestrator.output.plots import NUM_COLOURS, Scale, element, laid_out, plot, ticks
from batchscout.orchestrator.stages.figures import Axis, Cell, Figure, Mark, Series
from batchscout.orchestrator.units import number_text

_BAR_WIDTH = 260


def figure_element(figure: Figure, place: str) -> Element:
    """Return the picture with its caption. place: where on the page it stands; with its name it is told from all others."""
    values = chart_values(figure)
    picture = element("div", plot(figure), class_="picture")
    caption = element("figcaption", figure.caption) if figure.caption else None
    data = [json_element(values)] if values else []
    looks = {"class_": "chart" if values else None, "style": f"width:{figure.width}px"}
    return element("figure", picture, colour_key(figure.key), caption, *data, id=f"{place}-{figure.name}", **looks)


def colour_key(colours: Mapping[str, int]) -> Element | None:
    """Return what the colours stand for; None without any."""
    names = [element("span", element("i", class_=f"c{colour}"), name) for name, colour in colours.items()]
    return element("p", *names, class_="legend") if names else None


def json_element(values: JsonValue, **attributes: object) -> Element:
    """Return data for the script. No text in it can end the element."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return element("script", text, type="application/json", **attributes)


def chart_values(figure: Figure) -> dict[str, JsonValue] | None:
    """Return what the script draws: values and texts, and nothing that it would have to work out; None for an empty figure."""
    layout = laid_out(figure)
    if layout is None:
        return None
    return {
        "width": figure.width,
        "height": figure.height,
        "x": _axis(layout.x),
        "y": _axis(layout.y),
        "series": [_series(one, figure) for one in layout.series],
        "lines": [[line.value, line.label, line.vertical] for line in layout.lines],
        "cells": [_cell(cell, layout.x, layout.y) for cell in figure.cells],
    }


def _axis(scale: Scale) -> dict[str, JsonValue]:
    return {
        "label": scale.axis.label,
        "log": scale.axis.log,
        "ends": [_short(scale.low), _short(scale.high)],
        "ticks": [[_short(tick), scale.axis.text(tick)] for tick in ticks(scale)],
    }


def _series(series: Series, figure: Figure) -> dict[str, JsonValue]:
    return {
        "label": series.label,
        "colour": series.colour % NUM_COLOURS,
        "joined": series.joined,
        "dashed": series.dashed,
        "bold": series.bold,
        "marks": [_mark(mark, figure) for mark in series.marks],
    }


def _mark(mark: Mark, figure: Figure) -> list[JsonValue]:
    """Return the mark without what it has not at its end."""
    interval: list[JsonValue] | None = (
        None if mark.low is None or mark.high is None else [_short(mark.low), _finite(mark.high)]
    )
    kind = "" if mark.kind == "point" else mark.kind
    told = (_text(mark.x, figure.x), _text(mark.y, figure.y), mark.told)
    parts: list[JsonValue] = [_short(mark.x), _short(mark.y), interval, mark.text, kind, *told]
    while len(parts) > 2 and not parts[-1]:
        parts.pop()
    return parts


def _text(value: float, axis: Axis) -> str:
    """Return how the axis says a value; nothing where the number says it."""
    return "" if axis.text is number_text else axis.text(value)


def _cell(cell: Cell, x: Scale, y: Scale) -> list[JsonValue]:
    """Return the cell as far as the axes reach."""
    across = [_short(min(max(end, x.low), x.high)) for end in (cell.x_low, cell.x_high)]
    along = [_short(min(max(end, y.low), y.high)) for end in (cell.y_low, cell.y_high)]
    return [*across, *along, cell.colour % NUM_COLOURS, cell.strength, cell.told]


def _finite(end: float) -> float | None:
    """Return an interval's upper end; None where it has none, for which JSON has no number."""
    return _short(end) if math.isfinite(end) else None


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def time_bar(parts: Sequence[float], longest: float, told: str) -> Element:
    """Return the parts side by side, to the scale of the longest bar of the table."""
    scale = _BAR_WIDTH / max(longest, sum(parts), 1e-9)
    starts = [scale * sum(parts[:i]) for i in range(len(parts))]
    rects = [
        element("rect", x=round(start, 1), y=2, width=round(scale * part, 1), height=11, class_=f"c{i}")
        for i, (start, part) in enumerate(zip(starts, parts, strict=True))
    ]
    style = f"width:{_BAR_WIDTH}px;max-width:{_BAR_WIDTH}px"
    return element("svg", *rects, viewBox=f"0 0 {_BAR_WIDTH} 15", style=style, role="img", aria_label=told)
