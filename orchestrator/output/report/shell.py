"""What every page has around its body: its style and its script. Nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from batchscout.orchestrator.output.plots import element
from batchscout.orchestrator.output.report.pieces import within

_HERE = Path(__file__).parent


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
    # The script comes last, so that text and pictures are seen before it is read.
    script = [f"<script>{text_of('page.js')}</script>"]
    yield from within(element("html", lang="en", **live), head, within(element("body"), body, script))
    yield "\n"


def text_of(file: str) -> str:
    """Return a file that lies beside this one."""
    return (_HERE / file).read_text("utf-8")
