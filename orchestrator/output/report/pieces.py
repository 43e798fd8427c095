"""A page in pieces of HTML, each written and forgotten before the next is made: the tree of 10,000 trials takes 200 MB.

All text goes through the tree's writer, which escapes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from xml.etree.ElementTree import Element, tostring


def within(shell: Element, *parts: Element | Iterable[str] | None) -> Iterator[str]:
    """Yield the empty shell with the parts inside it; a part is an element, or comes in pieces itself."""
    closing = f"</{shell.tag}>"
    yield _html(shell).removesuffix(closing)
    for part in parts:
        if isinstance(part, Element):
            yield _html(part)
        elif part is not None:
            yield from part
    yield closing


def each(elements: Iterable[Element]) -> Iterator[str]:
    """Yield elements one after the other, made when they are asked for."""
    return map(_html, elements)


def _html(tree: Element) -> str:
    return tostring(tree, encoding="unicode", method="html")
