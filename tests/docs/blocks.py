"""The blocks of a page, and what it takes to run them as a reader would.

    ```sh          commands; each must succeed
    ```console     `$ command`, and below it what it says; ... stands for what may differ
    ```python      a program; the blocks of a page are one
    ```yaml        a study file, or some keys of one
    ```text        what is only shown

A block that cannot run where tests do has a line above it, which no reader sees: <!-- not run: why -->
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from batchscout.orchestrator import preflight
from batchscout.orchestrator.config.load import load_study
from batchscout.orchestrator.study.events import FactsRead
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.journal import Journal
from docs.site.pages import RECORDED, ROOT, text_of
from tests.support.processes import without_rays_settings

LANGUAGES = {"sh", "console", "python", "yaml", "text"}
_BLOCK = re.compile(
    r"^(<!-- not run: (?P<why>[^\n]+) -->\n)?(?P<fence>```+)(?P<language>\w*)\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
ERRORS = "docs/errors.md"
"""On this page every command that says something is refused, and on no other."""
_END = "-- the command ended with"


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str
    not_run: str | None
    """Why it is not run here; None where it is."""


@dataclass(frozen=True)
class Typed:
    """A command of a console block, and what stands below it."""

    command: str
    said: str


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page that people wrote."""
    return [Block(page, one["language"], one["text"], one["why"]) for one in _BLOCK.finditer(text_of(page))]


def typed_in(block: Block) -> list[Typed]:
    """Return the commands of a console block. One that ends with a backslash goes on in the next line."""
    _, *parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    found = [re.fullmatch(r"(?P<command>(?:.*\\\n)*.*\n?)(?P<said>[\s\S]*)", part) for part in parts]
    return [Typed(one["command"].strip(), one["said"].strip()) for one in found if one]


def clone_for_a_page(folder: Path) -> Path:
    """Return what a reader has: the clone's examples, and the studies that the pages tell of as if they had just been run."""
    for part in ("configs", "examples"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "base", "*.jsonl"))
    shutil.copytree(ROOT / RECORDED, recorded := folder / "runs" / "quickstart")
    with Journal(recorded / "journal.jsonl", "quickstart") as journal:
        journal.append(FactsRead(facts=Facts(contents=contents_here())))
    shutil.copytree(ROOT / "tests" / "golden" / "quickstart", folder / "runs" / "before")
    return folder


@functools.cache
def contents_here() -> dict[str, str]:
    """Return digests of the quickstart's data. They are the texts of Python's own library, which are others in another version."""
    return preflight.contents_of(load_study(ROOT / "configs" / "quickstart.yaml", []), print)


def run_commands(block: Block, folder: Path) -> None:
    """Run a block of commands, all of which must succeed."""
    done = _bash(f"set -euo pipefail\n{block.text}", folder)
    assert done.returncode == 0, f"{block.page}:\n{block.text}\n{done.stdout}"


def run_console(block: Block, folder: Path) -> None:
    """Run a block's commands in one shell, and hold what each says against what stands below it."""
    typed = typed_in(block)
    script = "".join(f"{one.command}\necho '{_END}' $?\n" for one in typed)
    *answers, _ = re.split(rf"^{_END} (\d+)$\n?", _bash(script, folder).stdout, flags=re.MULTILINE)
    for one, said, code in zip(typed, answers[::2], answers[1::2], strict=True):
        assert agrees(one.said, said), f"{block.page}: $ {one.command}\nthe page has:\n{one.said}\nit says:\n{said}"
        assert int(code) == (2 if one.said and block.page == ERRORS else 0), f"{block.page}: $ {one.command}: {code}"


def agrees(shown: str, said: str) -> bool:
    """True if a page shows what a command says, whatever stands where the page has `...`, and wherever it breaks lines."""
    pieces = [re.escape(" ".join(piece.split())) for piece in re.split(r"\.\.\.", shown)]
    pattern = r"\s?.*?\s?".join(piece.replace(r"\ ", r"\s") for piece in pieces)
    return re.fullmatch(pattern, " ".join(said.split()), re.DOTALL) is not None


def run_python(programs: list[str], folder: Path) -> str:
    """Run a page's blocks of Python as one program, and return what it prints."""
    command = [sys.executable, "-c", "\n".join(programs)]
    done = subprocess.run(command, cwd=folder, env=_settings(folder), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _bash(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    both = subprocess.PIPE, subprocess.STDOUT
    command = ["bash", "-c", script]
    return subprocess.run(command, cwd=folder, env=_settings(folder), text=True, stdout=both[0], stderr=both[1])


def _settings(folder: Path) -> dict[str, str]:
    """Return the environment of an active virtual environment in a wide window."""
    own = without_rays_settings()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return own | {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1", "HOME": str(folder)}


def inline_code(page: str) -> Iterator[str]:
    """Yield what stands between single backticks, outside of blocks."""
    for found in re.finditer(r"(?<!`)`([^`\n]+)`(?!`)", _BLOCK.sub("", text_of(page))):
        yield found[1]
