"""Which pages there are: those that people wrote, and those that are made of the code."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from docs.site import facade, keys, metrics, verbs

ROOT = Path(__file__).parents[2]
ON_TOP = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files beside docs/ that are pages too, and how the site calls them."""
GENERATED: dict[str, Callable[[], str]] = {
    "reference/keys.md": keys.page,
    "reference/metrics.md": metrics.page,
    "reference/commands.md": verbs.page,
    "reference/python.md": facade.page,
}
"""Pages that are made of the code's own types and docstrings, by their place on the site."""
RECORDED = "docs/recorded/quickstart"
"""The run directory of a real quickstart, which `python -m docs.site.record` has written."""

_INCLUDE = re.compile(r'^# --8<-- "(?P<path>[^":]+)(::(?P<name>\w+))?"$', re.MULTILINE)


def written_pages() -> dict[str, str]:
    """Return the place of every page that people wrote: in the repository, and on the site."""
    docs = sorted((ROOT / "docs").rglob("*.md"))
    return ON_TOP | {f"docs/{(name := path.relative_to(ROOT / 'docs').as_posix())}": name for path in docs}


def text_of(page: str) -> str:
    """Return a page that people wrote, with the files that it shows."""
    return with_files((ROOT / page).read_text())


def with_files(text: str) -> str:
    """Put the file, or what has that name in it, in the place of each line `# --8<-- "examples/vit/vit.py::data"`."""

    def shown(found: re.Match[str]) -> str:
        source = (ROOT / found["path"]).read_text()
        return (source if found["name"] is None else named_in(source, found["name"], found["path"])).rstrip()

    return _INCLUDE.sub(shown, text)


def named_in(source: str, name: str, where: str) -> str:
    """Return the function or class of this name. It ends before the next line that begins at the margin."""
    found = re.search(rf"^((@.*\n)*(def|class) {name}\b.*\n((?=[ \t)\n]).*\n)*)", source, re.MULTILINE)
    if found is None:
        raise ValueError(f"{where} has no function or class '{name}'; mend the line that shows it")
    return found[1]


def outside_of_code(text: str, change: Callable[[str], str]) -> str:
    """Return a page with everything but its code blocks changed."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def joined(page: str, link: str) -> str:
    """Return the place in the repository that a page's link leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
