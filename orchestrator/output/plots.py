"""Draws a figure as an SVG element. Colours come from the page's style sheet.

Elements are built as a tree, so that every text is escaped where it is written out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal
from xml.etree.ElementTree import Element

from batchscout.orchestrator.stages.figures import Axis, Cell, Figure, Line, Mark, Series

NUM_COLOURS = 7
_LEFT, _TOP, _BOTTOM, _LABEL_GAP = 58, 22, 40, 13
_CHARACTER = 6.1  # the width of a character of the 11 px labels, generously


def element(tag: str, *children: Element | str | None, **attributes: object) -> Element:
    """Return an HTML or SVG element; `class_` is class, and other underscores are dashes."""
    node = Element(tag, {_name(key): str(value) for key, value in attributes.items() if value is not None})
    for child in children:
        if isinstance(child, str):
            _append_text(node, child)
        elif child is not None:
            node.append(child)
    return node


@cache
def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _append_text(node: Element, text: str) -> None:
    if len(node):
        node[-1].tail = (node[-1].tail or "") + text
    else:
        node.text = (node.text or "") + text


@dataclass(frozen=True)
class Scale:
    """Where the values of an axis are drawn."""

    axis: Axis
    low: float
    high: float
    """The ends of the axis: values of it."""
    start: float
    end: float
    """Where these lie, in pixels."""

    def __call__(self, value: float) -> float:
        low, high, value = (self._flat(v) for v in (self.low, self.high, value))
        return round(self.start + (self.end - self.start) * (value - low) / (high - low), 1)

    def _flat(self, value: float) -> float:
        return math.log10(value) if self.axis.log else value


@dataclass(frozen=True)
class Layout:
    """What of a figure can be drawn, and where."""

    series: tuple[Series, ...]
    """Without the marks that an axis cannot show."""
    lines: tuple[Line, ...]
    x: Scale
    y: Scale
    height: int


def laid_out(figure: Figure) -> Layout | None:
    """Return where everything goes, with room at the right edge for the names of the series; None if there is nothing."""
    drawable = [_drawable(one, figure.x, figure.y) for one in figure.series]
    shown = tuple(one for one in drawable if one.marks)
    if not shown and not figure.cells:
        return None
    labels = [one.label for one in shown if one.label]
    right = figure.width - (18 + _CHARACTER * max((len(label) for label in labels), default=0))
    height = max(figure.height, _TOP + _BOTTOM + _LABEL_GAP * len(labels))
    x = _scale(figure.x, _values(figure, shown, "x"), _left(figure.y), right)
    y = _scale(figure.y, _values(figure, shown, "y"), height - _BOTTOM, _TOP)
    return Layout(shown, tuple(line for line in figure.lines if _inside(line, x, y)), x, y, height)


def plot(figure: Figure) -> Element:
    """Return the chart; series are named at its right edge, where they cannot cover a point."""
    layout = laid_out(figure)
    if layout is None:
        return _empty(figure.width, 80)
    x, y = layout.x, layout.y
    return element(
        "svg",
        *[_cell(cell, x, y) for cell in figure.cells],
        *_grid(x, y),
        *_lines(layout.lines, x, y),
        *[_series(one, x, y) for one in layout.series],
        *_labels(layout.series, x, y),
        viewBox=f"0 0 {figure.width} {layout.height}",
        style=f"max-width:{figure.width}px",
        role="img",
        aria_label=spoken(figure),
    )


def spoken(figure: Figure) -> str:
    """Return what a figure shows, for those who hear it."""
    axes = " over ".join(axis.label for axis in (figure.y, figure.x) if axis.label)
    return f"{axes}. {figure.caption}".strip()


def _left(y_axis: Axis) -> int:
    """Return where the plot begins: right of its numbers, or of the names of its rows."""
    return 30 + 7 * max(len(y_axis.text(tick)) for tick in y_axis.ticks) if y_axis.ticks else _LEFT


def _empty(width: int, height: int) -> Element:
    text = element("text", "nothing measured", x=width / 2, y=height / 2, class_="muted", text_anchor="middle")
    box = element("rect", x=0.5, y=0.5, width=width - 1, height=height - 1, class_="empty")
    return element("svg", box, text, viewBox=f"0 0 {width} {height}", style=f"max-width:{width}px", role="img")


def _drawable(series: Series, x_axis: Axis, y_axis: Axis) -> Series:
    """Return the series without the marks that an axis cannot show."""
    return replace(series, marks=tuple(m for m in series.marks if _fits(m.x, x_axis) and _fits(m.y, y_axis)))


def _fits(value: float, axis: Axis) -> bool:
    return math.isfinite(value) and (value > 0 or not axis.log) and (axis.top is None or value <= axis.top)


def _values(figure: Figure, series: Sequence[Series], name: Literal["x", "y"]) -> list[float]:
    """Return all values that must have a place on the axis."""
    axis, lines = (figure.x if name == "x" else figure.y), figure.lines
    marks = [mark for one in series for mark in one.marks]
    cells = figure.cells
    ends = [end for one in cells for end in ((one.x_low, one.x_high) if name == "x" else (one.y_low, one.y_high))]
    places = [mark.x if name == "x" else mark.y for mark in marks]
    bounds = [bound for mark in marks for bound in (mark.low, mark.high) if bound is not None and name == "y"]
    lined = [line.value for line in lines if line.vertical == (name == "x")]
    return [value for value in places + bounds + lined + ends if _fits(value, axis)]


def _scale(axis: Axis, values: list[float], start: float, end: float) -> Scale:
    """Return a scale that is a little wider than the values."""
    low, high = min(values), max(values)
    if axis.log:
        margin = max((high / low) ** 0.06, 1.15)
        return Scale(axis, low / margin, high * margin, start, end)
    # Ticks of our own on a linear axis are named rows, one apart.
    margin = 0.5 if axis.ticks else 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(axis, 0.0 if axis.zero and low >= 0 else low - margin, high + margin, start, end)


def ticks(scale: Scale) -> list[float]:
    axis = scale.axis
    if axis.ticks:
        return _thinned([tick for tick in axis.ticks if scale.low <= tick <= scale.high], scale)
    if axis.log:
        return _log_ticks(scale.low, scale.high)
    room = abs(scale.end - scale.start) / (70 if scale.end > scale.start else 45)
    step = _round_step((scale.high - scale.low) / axis.unit / max(2, room)) * axis.unit
    first = math.ceil(scale.low / step)
    return [round(step * i, 12) for i in range(first, math.floor(scale.high / step) + 1)]


def _round_step(rough: float) -> float:
    """Return the next of 1, 2, 2.5, 5, 10 times a power of ten."""
    power = 10 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = math.ceil(len(decades) / 8)
    factors = (1, 2, 5) if len(decades) <= 3 else (1,)
    ticks = [factor * 10.0**decade for decade in decades if decade % every == 0 for factor in factors]
    return [tick for tick in ticks if low <= tick <= high]


def _thinned(ticks: list[float], scale: Scale) -> list[float]:
    """Return the ticks without those whose text would touch the one before."""
    kept: list[float] = []
    for tick in sorted(set(ticks)):
        needed = 14 + _CHARACTER * len(scale.axis.text(tick)) if scale.end > scale.start else 14
        if not kept or abs(scale(tick) - scale(kept[-1])) >= needed:
            kept.append(tick)
    return kept


def _grid(x: Scale, y: Scale) -> list[Element]:
    """Return the rules at the y ticks, the texts of the ticks, and the names of the axes."""
    parts = [element("line", x1=x.start, x2=x.end, y1=y.start, y2=y.start, class_="axis")]
    for tick in ticks(y):
        parts.append(element("line", x1=x.start, x2=x.end, y1=y(tick), y2=y(tick), class_="rule"))
        parts.append(element("text", y.axis.text(tick), x=x.start - 7, y=y(tick) + 4, text_anchor="end"))
    for tick in ticks(x):
        parts.append(element("line", x1=x(tick), x2=x(tick), y1=y.start, y2=y.start + 4, class_="axis"))
        parts.append(element("text", x.axis.text(tick), x=x(tick), y=y.start + 16, text_anchor="middle"))
    middle = (x.start + x.end) / 2
    parts.append(element("text", x.axis.label, x=middle, y=y.start + 33, text_anchor="middle", class_="label"))
    parts.append(element("text", y.axis.label, x=0, y=11, class_="label"))
    return parts


def _inside(line: Line, x: Scale, y: Scale) -> bool:
    scale = x if line.vertical else y
    return math.isfinite(line.value) and scale.low <= line.value <= scale.high


def _cell(cell: Cell, x: Scale, y: Scale) -> Element:
    left, right = (min(max(x(end), x.start), x.end) for end in (cell.x_low, cell.x_high))
    top, bottom = (min(max(y(end), y.end), y.start) for end in (cell.y_high, cell.y_low))
    size = {"x": left, "y": top, "width": round(right - left, 1), "height": round(bottom - top, 1)}
    told = element("title", cell.told)
    return element("rect", told, **size, class_=f"cell c{cell.colour % NUM_COLOURS}", opacity=cell.strength)


def _lines(lines: Sequence[Line], x: Scale, y: Scale) -> list[Element]:
    """Return the lines. Where several are vertical the last is named to its right, and the others to their left."""
    upright = sorted((line for line in lines if line.vertical), key=lambda line: line.value)
    anchors = {
        line: "end" if line is not upright[-1] else "start" if len(upright) > 1 else "middle" for line in upright
    }
    return [_line(line, anchors.get(line, "end"), x, y) for line in lines]


def _line(line: Line, anchor: str, x: Scale, y: Scale) -> Element:
    if line.vertical:
        at = x(line.value)
        rule = element("line", x1=at, x2=at, y1=y.end, y2=y.start, class_="limit")
        return element("g", rule, element("text", line.label, x=at, y=y.end - 5, text_anchor=anchor, class_="strong"))
    at = y(line.value)
    rule = element("line", x1=x.start, x2=x.end, y1=at, y2=at, class_="limit")
    return element("g", rule, element("text", line.label, x=x.end, y=at - 4, text_anchor="end", class_="strong"))


def _series(series: Series, x: Scale, y: Scale) -> Element:
    """Return lines between what was measured, and a dashed one from there to what failed."""
    good = [mark for mark in series.marks if mark.kind != "cross"]
    failed = [mark for mark in series.marks if mark.kind == "cross"]
    looks = " ".join(name for name, wanted in (("dashed", series.dashed), ("bold", series.bold)) if wanted)
    paths = [_path(good, looks, x, y), _path([*good[-1:], *failed], "failed", x, y)] if series.joined else []
    marks = [part for mark in series.marks for part in _mark(mark, series, x, y)]
    return element("g", element("title", series.label), *paths, *marks, class_=f"series c{series.colour % NUM_COLOURS}")


def _path(marks: Sequence[Mark], looks: str, x: Scale, y: Scale) -> Element | None:
    points = " ".join(f"{x(mark.x)},{y(mark.y)}" for mark in marks)
    return element("polyline", points=points, class_=looks) if len(marks) > 1 else None


def _mark(mark: Mark, series: Series, x: Scale, y: Scale) -> list[Element]:
    at_x, at_y = x(mark.x), y(mark.y)
    parts: list[Element] = []
    if mark.low is not None and mark.high is not None and mark.low < mark.high:
        low, high = (y(min(max(bound, y.low), y.high)) for bound in (mark.low, mark.high))
        parts.append(element("line", x1=at_x, x2=at_x, y1=low, y2=high, class_="interval"))
        if math.isinf(mark.high):
            parts.append(element("path", d=f"M{at_x - 3},{high + 5}l3,-5l3,5", class_="interval"))
    if mark.kind == "chosen":
        parts.append(element("circle", cx=at_x, cy=at_y, r=8, class_="ring"))
    parts.append(_cross(at_x, at_y) if mark.kind == "cross" else _shape(at_x, at_y, series.colour))
    if mark.text:
        above = at_y - (12 if mark.kind == "chosen" else 7)
        parts.append(element("text", mark.text, x=at_x, y=above, text_anchor="middle", class_="note"))
    return parts


def _cross(x: float, y: float) -> Element:
    return element("path", d=f"M{x - 4},{y - 4}l8,8m0,-8l-8,8", class_="cross")


def _shape(x: float, y: float, colour: int) -> Element:
    """Return another shape for each colour, for those who cannot tell the colours apart."""
    shapes = (
        f"M{x - 3.4},{y}a3.4,3.4 0 1 0 6.8,0a3.4,3.4 0 1 0 -6.8,0z",
        f"M{x - 3},{y - 3}h6v6h-6z",
        f"M{x},{y - 4}l4,7h-8z",
        f"M{x},{y - 4.4}l4.4,4.4l-4.4,4.4l-4.4,-4.4z",
        f"M{x},{y + 4}l4,-7h-8z",
    )
    return element("path", d=shapes[colour % len(shapes)], class_="dot")


def _labels(series: Sequence[Series], x: Scale, y: Scale) -> list[Element]:
    """Return the names at the right edge, each as near to the last point of its series as the others allow."""
    named = sorted((one for one in series if one.label), key=lambda one: y(one.marks[-1].y))
    places = spread([y(one.marks[-1].y) for one in named], _LABEL_GAP, y.end, y.start)
    return [_label(one, place, x, y) for one, place in zip(named, places, strict=True)]


def _label(series: Series, place: float, x: Scale, y: Scale) -> Element:
    last = series.marks[-1]
    leader = f"{x(last.x) + 5},{y(last.y)} {max(x(last.x) + 5, x.end - 6)},{y(last.y)} {x.end + 6},{place}"
    return element(
        "g",
        element("polyline", points=leader, class_="leader"),
        element("text", series.label, x=x.end + 9, y=place + 4, class_="name bold" if series.bold else "name"),
        class_=f"series c{series.colour % NUM_COLOURS}",
    )


def spread(places: list[float], gap: float, low: float, high: float) -> list[float]:
    """Return sorted places moved apart until each is `gap` from the next, inside [low, high] where they all fit."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else max(place, low))
    for i in reversed(range(len(moved))):
        ceiling = high if i == len(moved) - 1 else moved[i + 1] - gap
        moved[i] = min(moved[i], ceiling)
    return moved
