"""Draws a figure as an SVG element. Colours come from the page's style sheet.

Elements are built as a tree, so that every text is escaped where it is written out. What the pointer tells of a mark is written at it
(data-x, data-y, ...): the page's script reads it from there.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal
from xml.etree.ElementTree import Element

from batchscout.orchestrator.stages.figures import (
    BASELINE_COLOUR,
    CHOSEN_COLOUR,
    FAILED_COLOUR,
    Axis,
    Cell,
    Figure,
    Line,
    Mark,
    Series,
)
from batchscout.orchestrator.units import number_text

NUM_COLOURS = 12
_TOP, _BOTTOM, _ROW = 24, 42, 15
_CHARACTER, _BOLD = 7.3, 8.2
"""The widths of a character of the 12 px texts in a wide font: what has room in it has room in every other."""
_BEFORE_NAME = 16
"""How far from the right edge of the plot the names of series begin."""
_SMALLEST = 0.65
"""A picture shrinks to so much of its size: one of usual width is as wide as a phone. A wider one is moved sideways there."""
_MOST_SHAPES = 30
"""A series of more marks has small dots, all alike."""


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


_SENTENCES, _EXPONENT = ("p", "li", "dd", "span", "figcaption"), re.compile(r"(\d[\d.]*e-\d+)")


def _append_text(node: Element, text: str) -> None:
    """Add it. In a sentence no line ends within 5.9e-06."""
    first, *others = _EXPONENT.split(text) if node.tag in _SENTENCES else [text]
    if len(node):
        node[-1].tail = (node[-1].tail or "") + first
    else:
        node.text = (node.text or "") + first
    for number, after in zip(others[::2], others[1::2], strict=True):
        whole = Element("span", {"class": "whole"})
        whole.text, whole.tail = number, after
        node.append(whole)


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

    @property
    def step(self) -> float:
        """How far round values lie apart of which as many have room as on a linear axis are told."""
        room = abs(self.end - self.start) / (60 if self.end > self.start else 45)
        return _round_step((self.high - self.low) / self.axis.unit / max(2, room)) * self.axis.unit

    def text(self, tick: float) -> str:
        """Return what is written at a tick: with as many decimals as the ticks have, where three digits do not tell them apart."""
        if self.axis.text is not number_text or self.axis.log or self.axis.ticks:
            return self.axis.text(tick)
        size = math.floor(math.log10(self.step))
        last = size if math.isclose(round(self.step / 10**size, 6) % 1, 0) else size - 1  # 2.5 has one more
        digits = math.floor(math.log10(max(abs(self.low), abs(self.high)))) - last + 1
        return number_text(tick) if digits <= 3 else f"{tick:,.{max(0, -last)}f}"


@dataclass(frozen=True)
class _Box:
    """The room that a text or a mark takes."""

    left: float
    top: float
    right: float
    bottom: float

    def within(self, other: _Box) -> bool:
        sides = self.left >= other.left and self.right <= other.right
        return sides and self.top >= other.top and self.bottom <= other.bottom

    def meets(self, other: _Box) -> bool:
        apart = self.right <= other.left or other.right <= self.left
        return not (apart or self.bottom <= other.top or other.bottom <= self.top)


@dataclass
class _Drawing:
    """A picture as it grows: its parts, and where its texts and marks lie, so that no text is put over another."""

    room: _Box
    """What lies outside is cut off, or is among the ticks."""
    parts: list[Element] = field(default_factory=list)
    texts: list[_Box] = field(default_factory=list)
    marks: list[_Box] = field(default_factory=list)

    def write(self, text: str, places: Sequence[tuple[float, float, str]], looks: str, *, always: bool) -> None:
        """Write the text at the first of the places (x, baseline, anchor) where it covers nothing.

        always: where there is no such place, write it where it covers no text, or else, unless it is a note, at the first place. What is
        left out is still told under the pointer and in the table.
        """
        if not text:
            return
        boxes = [self._box(text, *place, bold="strong" in looks) for place in places]
        inside = [one for one in boxes if one.within(self.room)]
        quiet = [one for one in inside if not any(map(one.meets, self.texts))]
        chosen = next((one for one in quiet if not any(map(one.meets, self.marks))), None)
        if chosen is None and always:
            chosen = next(iter(quiet), boxes[0] if looks != "note" else None)
        if chosen is not None:
            x, y, anchor = places[boxes.index(chosen)]
            self.texts.append(chosen)
            self.parts.append(
                element("text", text, x=round(x, 1), y=round(y, 1), text_anchor=anchor, class_=looks or None)
            )

    def _box(self, text: str, x: float, y: float, anchor: str, *, bold: bool) -> _Box:
        width = (_BOLD if bold else _CHARACTER) * len(text)
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        return _Box(left - 2, y - 11, left + width + 2, y + 3)


def plot(figure: Figure) -> Element:
    """Return the chart. Series are named at its right edge, where they cannot cover a point; marks that an axis cannot show are left out."""
    shown = list[Series]()
    for one in figure.series:
        marks = tuple(mark for mark in one.marks if _fits(mark.x, figure.x) and _fits(mark.y, figure.y))
        if marks:
            shown.append(replace(one, marks=marks))
    if not shown and not figure.cells:
        return _empty(figure.width)
    named = [one for one in shown if one.label and not one.faint]
    right = figure.width - (9 + _BEFORE_NAME + _CHARACTER * max((len(one.label) for one in named), default=0))
    top = _TOP + _ROW * sum(line.vertical for line in figure.lines)
    height = max(figure.height, top + _BOTTOM + _ROW * len(named))
    y = _scale(figure.y, _values(figure, shown, "y"), height - _BOTTOM, top)
    left = 14 + _CHARACTER * max([6, *(len(y.text(tick)) for tick in ticks(y))])
    x = _scale(figure.x, _values(figure, shown, "x"), left, right)
    drawing = _Drawing(_Box(0, 0, figure.width, height))
    drawing.parts += [_cell(cell, x, y) for cell in figure.cells]
    _draw_axes(drawing, x, y)
    drawing.room = replace(drawing.room, left=x.start, bottom=y.start - 1)
    _draw_shades(drawing, figure, x)
    _draw_names(drawing, named, x, y, are_lines=not figure.cells)
    _draw_lines(drawing, [line for line in figure.lines if _inside(line, x, y)], x, y)
    for one in shown:
        drawing.parts.append(_series(one, x, y))
        drawing.marks += _room_of(one, x, y)
    marks = (mark for one in shown for mark in one.marks)
    for mark in sorted(marks, key=lambda mark: mark.kind != "chosen"):  # it has the first choice of places
        drawing.write(mark.text, _beside(mark, x, y), "note", always=mark.kind == "chosen")
    return element(
        "svg",
        *drawing.parts,
        viewBox=f"0 0 {figure.width} {height}",
        style=f"max-width:{figure.width}px;min-width:{_SMALLEST * figure.width:.0f}px",
        role="img",
        aria_label=spoken(figure),
        data_beside=figure.beside or None,
    )


def spoken(figure: Figure) -> str:
    """Return what a figure shows, for those who hear it."""
    axes = " over ".join(axis.label for axis in (figure.y, figure.x) if axis.label)
    return f"{axes}. {figure.caption}".strip()


def _empty(width: int) -> Element:
    text = element("text", "nothing measured", x=width / 2, y=40.0, class_="muted", text_anchor="middle")
    box = element("rect", x=0.5, y=0.5, width=width - 1, height=79, class_="empty")
    return element("svg", box, text, viewBox=f"0 0 {width} 80", style=f"max-width:{width}px", role="img")


def _fits(value: float, axis: Axis) -> bool:
    is_between = (axis.bottom is None or value >= axis.bottom) and (axis.top is None or value <= axis.top)
    return math.isfinite(value) and (value > 0 or not axis.log) and is_between


def _values(figure: Figure, series: Sequence[Series], name: Literal["x", "y"]) -> list[float]:
    """Return all values that must have a place on the axis."""
    axis = figure.x if name == "x" else figure.y
    marks = [mark for one in series for mark in one.marks]
    ends = [end for it in figure.cells for end in ((it.x_low, it.x_high) if name == "x" else (it.y_low, it.y_high))]
    places = [mark.x if name == "x" else mark.y for mark in marks]
    bounds = [bound for mark in marks for bound in (mark.low, mark.high) if bound is not None and name == "y"]
    lined = [line.value for line in figure.lines if line.vertical == (name == "x")]
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
    """Return where the axis has texts: as many as have room, and no two that say the same."""
    axis = scale.axis
    if axis.ticks:
        return _thinned([tick for tick in axis.ticks if scale.low <= tick <= scale.high], scale)
    if axis.log and scale.high / scale.low > 4:
        return _thinned(_log_ticks(scale.low, scale.high), scale)
    step = scale.step
    first = math.ceil(scale.low / step)
    return _thinned([round(step * i, 12) for i in range(first, math.floor(scale.high / step) + 1)], scale)


def _round_step(rough: float) -> float:
    """Return the next of 1, 2, 2.5, 5, 10 times a power of ten."""
    power = 10 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = math.ceil(len(decades) / 8)
    factors = (1, 2, 5) if high / low < 1e3 else (1,)
    ticks = [factor * 10.0**decade for decade in decades if decade % every == 0 for factor in factors]
    return [tick for tick in ticks if low <= tick <= high]


def _thinned(ticks: list[float], scale: Scale) -> list[float]:
    """Return the ticks without those whose text would touch the one before, or would say the same."""
    kept: list[float] = []
    for tick in sorted(set(ticks)):
        text, last = scale.text(tick), scale.text(kept[-1]) if kept else ""
        needed = 8 + _CHARACTER * (len(text) + len(last)) / 2 if scale.end > scale.start else _ROW
        named_rows = scale.axis.ticks and scale.end < scale.start
        if not kept or (abs(scale(tick) - scale(kept[-1])) >= needed and (text != last or named_rows)):
            kept.append(tick)
    return kept


def _draw_axes(drawing: _Drawing, x: Scale, y: Scale) -> None:
    """Draw the rules at the y ticks, the texts of the ticks, and the names of the axes."""
    drawing.parts.append(element("line", x1=x.start, x2=x.end, y1=y.start, y2=y.start, class_="axis"))
    for tick in ticks(y):
        drawing.parts.append(element("line", x1=x.start, x2=x.end, y1=y(tick), y2=y(tick), class_="rule"))
        drawing.write(y.text(tick), [(x.start - 7, y(tick) + 4, "end")], "", always=True)
    for tick in ticks(x):
        drawing.parts.append(element("line", x1=x(tick), x2=x(tick), y1=y.start, y2=y.start + 4, class_="axis"))
        drawing.write(x.text(tick), [(x(tick), y.start + 17, "middle")], "", always=True)
    drawing.write(x.axis.label, [((x.start + x.end) / 2, y.start + 36, "middle")], "label x", always=True)
    drawing.write(y.axis.label, [(0, 12, "start")], "label y", always=True)


def _inside(line: Line, x: Scale, y: Scale) -> bool:
    scale = x if line.vertical else y
    return math.isfinite(line.value) and scale.low <= line.value <= scale.high


def _cell(cell: Cell, x: Scale, y: Scale) -> Element:
    left, right = (min(max(x(end), x.start), x.end) for end in (cell.x_low, cell.x_high))
    top, bottom = (min(max(y(end), y.end), y.start) for end in (cell.y_high, cell.y_low))
    size = {"x": left, "y": top, "width": round(right - left, 1), "height": round(bottom - top, 1)}
    told = element("title", cell.told)
    return element("rect", told, **size, class_=f"cell c{cell.colour % NUM_COLOURS}", opacity=cell.strength)


def _draw_shades(drawing: _Drawing, figure: Figure, x: Scale) -> None:
    """Draw the scale of the cells' strengths, from the right edge of the plot to the left, and before it of what: what their marks tell, too."""
    right = x.end
    for told, strength in reversed(tuple(figure.shades.items())):
        right -= _CHARACTER * len(told)
        drawing.write(told, [(right, 12, "start")], "", always=True)
        looks = {"class_": f"cell c{figure.cells[0].colour}", "opacity": strength}
        drawing.parts.append(element("rect", x=round(right - 22, 1), y=2, width=18, height=11, **looks))
        right -= 34
    drawing.write(figure.beside if figure.shades else "", [(right - 2, 12, "end")], "label", always=True)


def _draw_lines(drawing: _Drawing, lines: Sequence[Line], x: Scale, y: Scale) -> None:
    """Draw the lines. The name of each upright one has a row of its own above the plot, on the side where there is room; the nearer
    a line is to that side, the lower is its name, so that no line crosses another's name."""
    middle = (x.start + x.end) / 2
    upright = sorted((line for line in lines if line.vertical), key=lambda line: abs(x(line.value) - middle))
    for row, line in enumerate(upright):
        at, top = x(line.value), y.end - _ROW * row
        drawing.parts.append(element("line", x1=at, x2=at, y1=top - 3, y2=y.start, class_="limit"))
        places = [(at - 4, top - 4, "end"), (at + 4, top - 4, "start")]
        drawing.write(line.label, places if at > middle else places[::-1], "strong", always=True)
        drawing.marks.append(_Box(at - 1, top, at + 1, y.start))
    for line in lines:
        if not line.vertical:
            at = y(line.value)
            drawing.parts.append(element("line", x1=x.start, x2=x.end, y1=at, y2=at, class_="limit"))
            places = [(x.end, at - 5, "end"), (x.end, at + 14, "end"), (x.start + 4, at - 5, "start"), (x.start + 4, at + 14, "start")]  # fmt: skip
            drawing.write(line.label, places, "strong", always=True)
            drawing.marks.append(_Box(x.start, at - 1, x.end, at + 1))


def _across(mark: Mark, x: Scale) -> float:
    return round(x(mark.x) + mark.aside, 1)


def _series(series: Series, x: Scale, y: Scale) -> Element:
    """Return lines between what was measured, and a dashed one from there to what failed."""
    good = [mark for mark in series.marks if mark.kind != "cross"]
    failed = [mark for mark in series.marks if mark.kind == "cross"]
    looks = " ".join(name for name, wanted in (("dashed", series.dashed), ("bold", series.bold)) if wanted)
    lines = ((_corners(good, series), looks), ([*good[-1:], *failed], "failed")) if series.joined else ()
    paths = [_path(points, look, x, y) for points, look in lines]
    marks = [part for mark in series.marks if not series.steps for part in _mark(mark, series, x, y)]
    faint = " faint" if series.faint else ""
    kind = f"series c{series.colour % NUM_COLOURS}{faint}"
    return element("g", element("title", series.label), *paths, *marks, class_=kind)


def _corners(marks: Sequence[Mark], series: Series) -> list[Mark]:
    """Return the marks with what lies between them where they are joined by steps."""
    between = [replace(one, x=other.x) for one, other in itertools.pairwise(marks)] if series.steps else []
    return [mark for some in itertools.zip_longest(marks, between) for mark in some if mark]


def _path(marks: Sequence[Mark], looks: str, x: Scale, y: Scale) -> Element | None:
    points = " ".join(f"{_across(mark, x)},{y(mark.y)}" for mark in marks)
    return element("polyline", points=points, class_=looks or None) if len(marks) > 1 else None


def _mark(mark: Mark, series: Series, x: Scale, y: Scale) -> list[Element]:
    """Return the mark with its interval. Its values are those that the pointer tells."""
    at_x, at_y = _across(mark, x), y(mark.y)
    told: dict[str, str | None] = {"data_x": x.axis.told(mark.x), "data_y": y.axis.told(mark.y)}
    role = {"chosen": CHOSEN_COLOUR, "cross": FAILED_COLOUR, "baseline": BASELINE_COLOUR}.get(mark.kind)
    colour = series.colour if role is None else role
    kind = "" if role is None else f" c{role}"
    parts: list[Element] = []
    if mark.low is not None and mark.high is not None and mark.low < mark.high:
        low, high = (y(min(max(bound, y.low), y.high)) for bound in (mark.low, mark.high))
        told |= {
            "data_low": y.axis.told(mark.low),
            "data_high": "no upper end" if math.isinf(mark.high) else y.axis.told(mark.high),
        }
        end = "m-3,5l3,-5l3,5" if math.isinf(mark.high) else "m-3,0h6"
        parts.append(element("path", d=f"M{at_x - 3},{low}h6m-3,0V{high}{end}", class_=f"interval{kind}"))
    if mark.kind == "chosen":
        parts.append(element("circle", cx=at_x, cy=at_y, r=8, class_=f"ring{kind}"))
    told |= {"data_text": mark.text or None, "data_told": mark.told or None}
    many = len(series.marks) > _MOST_SHAPES
    shape = "h0" if many and mark.kind != "cross" else _shape(mark.kind, colour)
    looks = "cross" if mark.kind == "cross" else "dot small" if many else "dot"
    parts.append(element("path", d=f"M{at_x},{at_y}{shape}", class_=looks + kind, **told))
    return parts


def _shape(kind: str, colour: int) -> str:
    return _CROSS if kind == "cross" else _SHAPES[colour % len(_SHAPES)]


_CROSS = "m-4,-4l8,8m0,-8l-8,8"
_SHAPES = (
    "m-3.4,0a3.4,3.4 0 1 0 6.8,0a3.4,3.4 0 1 0 -6.8,0z",
    "m-3,-3h6v6h-6z",
    "m0,-4l4,7h-8z",
    "m0,-4.4l4.4,4.4l-4.4,4.4l-4.4,-4.4z",
    "m0,4l4,-7h-8z",
    "m-4.4,-2h8.8v4h-8.8z",
    "m-2,-4.4h4v8.8h-4z",
)
"""Another one for each colour, for those who cannot tell the colours apart."""


def _room_of(series: Series, x: Scale, y: Scale) -> Iterator[_Box]:
    """Yield where marks, their intervals and the lines between them lie; nothing for so many that texts could not stand elsewhere."""
    if len(series.marks) > _MOST_SHAPES:
        return
    for mark in series.marks:
        at_x, at_y, size = _across(mark, x), y(mark.y), 8.0 if mark.kind == "chosen" else 4.0
        yield _Box(at_x - size, at_y - size, at_x + size, at_y + size)
        if mark.low is not None and mark.high is not None:
            low, high = (y(min(max(bound, y.low), y.high)) for bound in (mark.low, mark.high))
            yield _Box(at_x - 3, high, at_x + 3, low)
    for one, other in itertools.pairwise(_corners(series.marks, series) if series.joined else ()):
        start, end = (_across(one, x), y(one.y)), (_across(other, x), y(other.y))
        steps = math.ceil(math.dist(start, end) / 8)
        for share in (i / steps for i in range(1, steps)):
            at_x, at_y = (a + share * (b - a) for a, b in zip(start, end, strict=True))
            yield _Box(at_x - 2, at_y - 2, at_x + 2, at_y + 2)


def _beside(mark: Mark, x: Scale, y: Scale) -> list[tuple[float, float, str]]:
    """Return where a mark's text may stand: above, right, left and below, at the ends of its interval, at its corners, and of the
    chosen mark, whose text is always written, further away."""
    at_x, at_y, off = _across(mark, x), y(mark.y), 12 if mark.kind == "chosen" else 8
    ends = [y(end) for end in (mark.high, mark.low) if end is not None and y.low <= end <= y.high]
    rows = (up for more in range(0, 200 if mark.kind == "chosen" else 1, 14) for up in (-off - more, off + 9 + more))
    sides = ((off - 3, "start"), (3 - off, "end"), (0, "middle"))
    return [
        (at_x, at_y - off, "middle"),
        (at_x + off, at_y + 4, "start"),
        (at_x - off, at_y + 4, "end"),
        (at_x, at_y + off + 9, "middle"),
        *((at_x, end - 7 if end < at_y else end + 15, "middle") for end in ends),
        *((at_x + side, at_y + up, anchor) for up in rows for side, anchor in sides),
    ]


def _draw_names(drawing: _Drawing, series: Sequence[Series], x: Scale, y: Scale, *, are_lines: bool) -> None:
    """Draw the names at the right edge, each as near to the last point of its series as the others allow: a line leads from there to the
    name of a joined series. Other marks, and those on cells, are known by their shape, which stands before the name."""
    named = sorted(series, key=lambda one: y(one.marks[-1].y))
    for one, place in zip(named, spread([y(one.marks[-1].y) for one in named], _ROW, y.end, y.start - 2), strict=True):
        last, name_x = one.marks[-1], round(x.end + _BEFORE_NAME, 1)
        if are_lines and one.joined:
            begin, at = _across(last, x) + 5, y(last.y)
            bend = max(begin, x.end - 6)
            leads = element("polyline", points=f"{begin},{at} {bend},{at} {name_x - 3},{place}", class_="leader")
            drawing.marks += [_Box(begin, at - 1, bend, at + 1), _Box(bend, min(at, place), name_x, max(at, place))]
        else:
            kind = last.kind if all(mark.kind == last.kind for mark in one.marks) else "point"
            leads = element(
                "path",
                d=f"M{name_x - 8},{place}{_shape(kind, one.colour)}",
                class_="cross" if kind == "cross" else "dot",
            )
        name = element("text", one.label, x=name_x, y=round(place + 4, 1), class_="bold" if one.bold else None)
        drawing.texts.append(
            _Box(name_x - (7 if are_lines and one.joined else 14), place - 7, drawing.room.right, place + 7)
        )
        drawing.parts.append(element("g", leads, name, class_=f"series name c{one.colour % NUM_COLOURS}"))


def spread(places: list[float], gap: float, low: float, high: float) -> list[float]:
    """Return sorted places moved apart until each is `gap` from the next, inside [low, high] where they all fit."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else max(place, low))
    for i in reversed(range(len(moved))):
        ceiling = high if i == len(moved) - 1 else moved[i + 1] - gap
        moved[i] = min(moved[i], ceiling)
    return moved
