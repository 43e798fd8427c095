"""The site: all of its pages can be reached, and nothing of it comes from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import Grid
from batchscout.trainers.strict import Strict
from docs.site import facade, keys, verbs
from docs.site.gather import relinked
from docs.site.pages import GENERATED, ROOT, named_in, written_pages
from tests.support.browser import Browser, chromium


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as CI builds it."""
    pytest.importorskip("zensical", reason="pip install -e '.[docs]'")
    into = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "docs.site", "--into", str(into)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return into / "site"


def in_navigation(tree: object) -> set[str]:
    match tree:
        case str():
            return {tree}
        case dict():
            return {page for value in tree.values() for page in in_navigation(value)}
        case list():
            return {page for value in tree for page in in_navigation(value)}
        case _:
            raise AssertionError(tree)


def test_every_page_can_be_reached() -> None:
    nav = yaml.safe_load((ROOT / "docs" / "site" / "mkdocs.yml").read_text())["nav"]
    assert in_navigation(nav) == {*written_pages().values(), *GENERATED}


@pytest.mark.slow
def test_the_site_has_a_real_report_and_fetches_nothing(site: Path) -> None:
    assert (site / "recorded" / "quickstart" / "report.html").read_text().count("<svg") >= 1
    fetched = re.compile(r"<(script|link|img)[^>]*(src|href)=.?https?:")
    for page in site.rglob("*.html"):
        assert not fetched.search(page.read_text()), page


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="apt-get install chromium")
def test_a_reader_without_a_network_sees_and_finds_everything(site: Path) -> None:
    with Browser() as tab:
        for width, dark in ((1280, False), (420, True)):
            tab.show_as(width, dark=dark)
            for page in ("index", "errors", "reliability", "recorded/quickstart/report"):
                tab.open(site / f"{page}.html")
                assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{page} at {width}"
        tab.show_as(1280)
        tab.open(site / "reference" / "keys.html")
        tab.evaluate("document.querySelector('.md-search__button').click()")
        tab.until("document.activeElement.shadowRoot?.querySelector('input') !== null")
        tab.call("Input.insertText", text="reference_batch_size")
        tab.until("document.activeElement.shadowRoot.textContent.includes('optimizer.reference_batch_size')")
        assert tab.errors == []
        assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []


def test_a_dead_link_ends_the_build(tmp_path: Path) -> None:
    pytest.importorskip("zensical", reason="pip install -e '.[docs]'")
    (tmp_path / "pages").mkdir()
    (tmp_path / "mkdocs.yml").write_text("site_name: x\ndocs_dir: pages\n")
    (tmp_path / "pages" / "index.md").write_text("# One\n\n[nowhere](two.md)\n")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", "mkdocs.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "two.md" in re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)


def test_every_key_is_on_its_page() -> None:
    page = keys.page()
    for key in StudyConfig.model_fields:
        assert f"\n#### `{key}`\n" in page
    for key in Grid.model_fields:
        assert f"\n#### `stages.grid.{key}`\n" in page
    assert "*a whole number, at least 1* · default `1024`" in page
    assert "*`pretrain`, `finetune`* · default `pretrain`" in page


def test_a_key_without_a_word_under_it_is_no_page() -> None:
    class Silent(Strict):
        """A section."""

        loud: int = 1
        """It says something."""
        silent: int = 2

    with pytest.raises(AssertionError, match=r"Silent has keys without a word under them: \['silent'\]"):
        keys.documented(Silent)


def test_every_verb_and_every_public_name_is_on_its_page() -> None:
    assert {"plan", "run", "status", "launch slurm"} <= verbs.verbs_of_the_program().keys()
    for verb in verbs.verbs_of_the_program():
        assert f"\n## `batchscout {verb}`\n" in verbs.page()
    for name in ("find", "load", "Study", "Recommendation"):
        assert f"\n## `batchscout.{name}`\n" in facade.page()


def test_what_is_shown_of_a_command_and_of_a_function_is_readable() -> None:
    page = verbs.page()
    assert "default runs/&lt;name>" in page, "a browser would take <name> for a tag"
    assert "==SUPPRESS==" not in page
    defaults = [line.count("default") for line in page.splitlines() if line.startswith("| ")]
    assert max(defaults) == 1, "a default that the help names is not added to it again"
    assert "model: Any = None," in facade.page()
    assert "'Any'" not in facade.page()


def test_links_lead_to_where_things_are_on_the_site() -> None:
    places = {
        "docs/own/loop.md": "own/loop.md",
        "README.md": "index.md",
        "examples/vit/vit.py": "source/examples/vit/vit.py.md",
    }
    text = "[a](../../README.md#top) [b](../../examples/vit/vit.py) [c](../report.png) [d](https://x.org)\n```sh\n[e](../../README.md)\n```\n"
    assert relinked(text, "docs/own/loop.md", places) == (
        "[a](../index.md#top) [b](../source/examples/vit/vit.py.md) [c](../report.png) [d](https://x.org)\n"
        "```sh\n[e](../../README.md)\n```\n"
    )


def test_a_part_of_a_file_is_shown_by_its_name() -> None:
    source = "import os\n\n\n@cached\ndef first(\n    a: int,\n) -> int:\n    one = a\n\n    return one\n\n\nclass Second:\n    x = 1\n"
    assert named_in(source, "first", "a.py").rstrip() == source[source.index("@cached") : source.index("\n\n\nclass")]
    assert named_in(source, "Second", "a.py") == "class Second:\n    x = 1\n"
    with pytest.raises(ValueError, match=r"a\.py has no function or class 'third'; mend the line that shows it"):
        named_in(source, "third", "a.py")
