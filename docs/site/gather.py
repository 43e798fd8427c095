"""Puts all that the site is made of into one folder: pages whose links lead within the site, pictures, a rendered report, and
the source files that pages link to. What builds the site finds plain Markdown there, and needs no plugin of ours."""

from __future__ import annotations

import ast
import posixpath
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from batchscout.orchestrator.output.loaded import load
from batchscout.orchestrator.output.results import write_results
from docs.site.pages import GENERATED, RECORDED, ROOT, joined, outside_of_code, text_of, written_pages

_LINK = re.compile(r"\]\((?!https?:|mailto:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_REPORT = "recorded/quickstart/report.html"
ON_THE_SITE_ALONE = {
    "docs/index.md": ("[a report](report.md)", f"[this report]({_REPORT})"),
    "docs/quickstart.md": ("the report of this run", f"[the report of this run]({_REPORT})"),
    "docs/report.md": ("that of the recorded quickstart", f"[that of the recorded quickstart]({_REPORT})"),
    "docs/errors.md": ("every key has its own text", "[every key](reference/keys.md) has its own text"),
}
"""What stands in the repository, where these files are not, and with its link on the site."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "sh", ".css": "css", ".toml": "toml"}


def gather(into: Path) -> None:
    """Write mkdocs.yml and pages/ into a folder, in the place of what an earlier call wrote there."""
    pages = into / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "site" / "mkdocs.yml", into)
    for own in ("extra.css", "iframe-worker.js"):
        shutil.copy(ROOT / "docs" / "site" / own, pages)
    shutil.copytree(ROOT / RECORDED, pages / "recorded" / "quickstart")
    render_report(pages / "recorded" / "quickstart")
    written = written_pages()
    sources = sorted({place for page in written for place in linked(page) if is_source(place)})
    places = written | {source: f"source/{source}.md" for source in sources}
    for page, place in written.items():
        write(pages / place, with_links_of_the_site(page, relinked(text_of(page), page, places)))
    for source in sources:
        write(pages / places[source], source_page(source))
    for place, made in GENERATED.items():
        write(pages / place, made())
    for picture in {place for page in written for place in linked(page) if place.endswith(".png")}:
        shutil.copy(ROOT / picture, pages / posixpath.relpath(picture, "docs"))


def with_links_of_the_site(page: str, text: str) -> str:
    """Return a page with a link to what is made for the site alone, where it has one."""
    plain, link = ON_THE_SITE_ALONE.get(page, ("", ""))
    assert plain in text, f"{page} has no '{plain}'; mend ON_THE_SITE_ALONE"
    return text.replace(plain, link, 1)


def render_report(run_dir: Path) -> None:
    """Write the report of a recorded study beside its journal."""
    study = load(run_dir)
    write_results(study.config, run_dir, study.replayed)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def linked(page: str) -> Iterable[str]:
    """Return the places in the repository that a page links to."""
    found: list[str] = []
    outside_of_code(text_of(page), lambda text: found.extend(one["path"] for one in _LINK.finditer(text)) or text)
    return [joined(page, link) for link in found]


def is_source(place: str) -> bool:
    """True of a file or folder of the repository that is no page and no picture."""
    path = ROOT / place
    return path.is_dir() or (path.is_file() and path.suffix not in (".md", ".png"))


def relinked(text: str, page: str, places: dict[str, str]) -> str:
    """Return a page whose links lead to where things are on the site. A picture stays where it is below docs/."""
    here = posixpath.dirname(places[page])

    def there(found: re.Match[str]) -> str:
        target = joined(page, found["path"])
        on_site = places.get(target, posixpath.relpath(target, "docs"))
        return f"]({posixpath.relpath(on_site, here or '.')}{found['anchor'] or ''})"

    return outside_of_code(text, lambda part: _LINK.sub(there, part))


def source_page(source: str) -> str:
    """Return a page that shows a file, or lists what is in a folder."""
    path = ROOT / source
    if path.is_dir():
        rows = (f"| `{one.name}` | {first_words(one)} |" for one in sorted(path.iterdir()) if one.name[:2] != "__")
        return f"# {source}/\n\n| file | what it is |\n|---|---|\n" + "\n".join(rows) + "\n"
    # The fence is longer than any within.
    return f"# {source}\n\n`````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text().rstrip()}\n`````\n"


def first_words(path: Path) -> str:
    """Return the first sentence of a Python file's docstring."""
    if path.suffix != ".py":
        return ""
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(said.partition("\n\n")[0].split()).replace("|", "\\|")
