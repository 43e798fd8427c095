"""What every page has around its body: style, the library that draws, and the script. Nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from batchscout.orchestrator.output.plots import element
from batchscout.orchestrator.output.report.pieces import within

_HERE = Path(__file__).parent
_LIBRARIES = ("d3", "plot")
"""In the order in which they must be there; vendor/README.md says where they come from."""


def page(title: str, body: Iterable[str], every: float | None = None) -> Iterator[str]:
    """Yield the whole page. every: the seconds after which it is to look for a newer one; None for a page that stays."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", "\n" + text_of("figure.css") + text_of("style.css")),
    )
    live = {} if every is None else {"data_every": f"{every:g}"}
    yield "<!DOCTYPE html>\n"
    # The script comes last, so that text and static pictures are seen before it is read.
    yield from within(element("html", lang="en", **live), head, within(element("body"), body, _scripts()))
    yield "\n"


@cache
def _scripts() -> tuple[str, ...]:
    """Return the elements of the libraries, each under its licence, and of the page's own script."""
    libraries = [f"/*\n{text_of(f'vendor/{name}.LICENSE')}*/\n{_library(name)}" for name in _LIBRARIES]
    return tuple(f"<script>{text}</script>" for text in (*libraries, text_of("page.js")))


def _library(name: str) -> str:
    return text_of({"d3": "vendor/d3.min.js", "plot": "vendor/plot.umd.min.js"}[name])


def text_of(file: str) -> str:
    """Return a file that lies beside this one."""
    return (_HERE / file).read_text("utf-8")
