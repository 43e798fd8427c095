"""Elements of the page for figures, and for the parts of a whole."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from orchestrator.output.plots import element, plot
from orchestrator.stages.figures import Figure

_BAR_WIDTH = 260


def figure_element(figure: Figure) -> Element:
    return element("figure", plot(figure), element("figcaption", figure.caption) if figure.caption else None)


def time_bar(parts: Sequence[float], longest: float) -> Element:
    """Return the parts side by side, to the scale of the longest bar of the table."""
    scale = _BAR_WIDTH / max(longest, sum(parts), 1e-9)
    starts = [scale * sum(parts[:i]) for i in range(len(parts))]
    rects = [
        element("rect", x=round(start, 1), y=2, width=round(scale * part, 1), height=11, class_=f"c{i}")
        for i, (start, part) in enumerate(zip(starts, parts, strict=True))
    ]
    style = f"width:{_BAR_WIDTH}px;max-width:{_BAR_WIDTH}px"
    return element("svg", *rects, viewBox=f"0 0 {_BAR_WIDTH} 15", style=style, role="img")
