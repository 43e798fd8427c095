"""Every command, snippet and study file on the pages is what it says it is."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchscout.orchestrator.config.load import parse_study
from batchscout.orchestrator.config.sources import From
from batchscout.orchestrator.output.recommendation import Recommendation
from docs.site.pages import RECORDED, ROOT, written_pages
from docs.site.record import ANSWER, PRINTED, answer_for_a_page
from docs.site.verbs import verbs_of_the_program
from tests.docs.blocks import (
    LANGUAGES,
    Block,
    agrees,
    blocks_of,
    clone_for_a_page,
    inline_code,
    run_commands,
    run_console,
    run_python,
)
from tests.support.every import for_every

PAGES = sorted([*written_pages(), "README.md"])
MEASUREMENTS = "docs/benchmarks.md"
"""This page is written by benchmarks/write_page.py, and its blocks are the commands that measured what it tells."""
A_STUDY = "a whole study, in minutes"
NOT_RUN = {
    ("CONTRIBUTING.md", ".ci/run sets up a fresh environment"): 1,
    ("CONTRIBUTING.md", "the tests themselves"): 1,
    ("README.md", ".ci/run types these two in a fresh environment"): 1,
    ("README.md", "train.py is yours"): 1,
    ("docs/index.md", "a whole study, in minutes"): 1,
    ("docs/index.md", "train.py is yours"): 1,
    ("docs/cluster.md", "it needs SLURM; tests/launch does it where there is one"): 1,
    ("docs/cluster.md", "it needs a cluster on AWS"): 3,
    ("docs/cluster.md", "it needs a cluster of Kubernetes"): 1,
    ("docs/cluster.md", "it needs an account of a cloud"): 1,
    (
        "docs/errors.md",
        "it needs a cluster of several nodes; tests/execution/nodes/test_shared_storage.py has one",
    ): 1,
    ("docs/errors.md", "it needs a store; tests/execution/test_stored_runs.py has one"): 1,
    ("docs/storage.md", "it needs a store; tests/execution/test_stored_runs.py has one"): 1,
    ("docs/helpers.md", "it ends with 1 where the machine has a fault"): 1,
    ("docs/own/adapters.md", f"{A_STUDY}; tests/test_examples.py trains this model"): 1,
    ("docs/own/lightning.md", "two lines of a script; tests/test_examples.py runs the script"): 1,
    ("docs/own/lightning.md", f"{A_STUDY}; tests/test_examples.py runs speed.yaml scaled down"): 1,
    ("docs/own/loop.md", "a whole study; tests/test_examples.py runs this script scaled down"): 1,
    ("docs/own/loop.md", A_STUDY): 1,
    ("docs/own/script.md", A_STUDY): 1,
    ("docs/own/transformers.md", f"{A_STUDY}; tests/test_examples.py runs speed.yaml scaled down"): 1,
    ("docs/quickstart.md", ".ci/run installs into a fresh environment"): 1,
    (
        "docs/own/vision.md",
        "whole studies, in minutes; tests/test_examples.py runs cnn scaled down, and a trial of each",
    ): 1,
}
"""Blocks that no test runs: the page, why, and how many of them there are."""


@pytest.fixture
def clone(tmp_path: Path, data_cache: Path) -> Path:
    return clone_for_a_page(tmp_path)


def all_blocks() -> list[Block]:
    return [block for page in PAGES if page != MEASUREMENTS for block in blocks_of(page)]


def with_blocks(*languages: str) -> list[str]:
    """The pages that have a block of one of these languages to run."""
    return list(dict.fromkeys(one.page for one in all_blocks() if one.language in languages and not one.not_run))


def of_page(page: str, *languages: str) -> list[Block]:
    return [block for block in blocks_of(page) if block.language in languages and block.not_run is None]


def test_every_block_says_what_it_is() -> None:
    assert {block.language for block in all_blocks()} <= LANGUAGES


def test_what_cannot_run_here_is_known_with_its_reason() -> None:
    assert Counter((block.page, block.not_run) for block in all_blocks() if block.not_run) == NOT_RUN


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("page", with_blocks("sh", "console"))
def test_commands_do_what_the_page_says(page: str, clone: Path) -> None:
    for block in of_page(page, "sh", "console"):
        (run_console if block.language == "console" else run_commands)(block, clone)


@pytest.mark.slow
@pytest.mark.parametrize("page", with_blocks("python"))
def test_python_runs(page: str, clone: Path) -> None:
    run_python([block.text for block in of_page(page, "python")], clone)


def study_of(keys: object) -> dict[str, Any]:
    """A whole study file of what a page shows of one: stages alone, some keys, or all."""
    if isinstance(keys, list):  # of stages; those that need a chosen run come after the one that chooses
        return study_of({"stages": [{"type": "train"}, *keys]})
    assert isinstance(keys, dict)
    rest = {key: value for key, value in keys.items() if key != "from"}
    if "from" in keys:
        From.model_validate(keys["from"])
    weights = {"initial_weights": "own"} if keys.get("regime") == "finetune" else {}
    budget = {"sample_budget": 1024} if keys.get("regime") == "finetune" else {}
    whole = {"name": "shown", "model": {"target": "gpt"}, "data": {"target": "python_stdlib"}}
    return whole | weights | budget | rest


@for_every(block=[one for one in all_blocks() if one.language == "yaml"])
def test_study_files_are_read(block: Block) -> None:
    parse_study(study_of(yaml.safe_load(block.text) or {}), block.page)


def typed_on(page: str) -> list[str]:
    """The commands that a page names in its text, or in a block that is only shown."""
    shown = [
        line.partition("    ")[0]
        for block in blocks_of(page)
        if block.language == "text"
        for line in block.text.splitlines()
    ]
    return [line for line in (*inline_code(page), *shown) if re.match(r"(batchscout|python|pytest) ", line)]


@for_every(page=PAGES)
def test_commands_in_the_text_exist(page: str) -> None:
    for command in typed_on(page):
        words = shlex.split(command.replace("[", " ").replace("]", " "))
        assert is_ours(words[1:]) if words[0] == "batchscout" else is_there(words), f"{page}: {command}"


def is_ours(words: list[str]) -> bool:
    """True if there is such a verb, and if it takes the options."""
    verbs = verbs_of_the_program()
    found = next((verb for verb in verbs if words[: len(verb.split())] == verb.split()), None)
    if found is None:
        return words[0] in {"--version", "--help", "VERB", "launch"}
    return all(word.partition("=")[0] in verbs[found] for word in words if word.startswith("--"))


def is_there(words: list[str]) -> bool:
    """True if the script, module or tests that a command names exist."""
    named = [word.partition("::")[0] for word in words if re.match(r"(tests|benchmarks|docs|examples)[/.]?", word)]
    placeholders = ("NAME", "_DIR")
    return all(
        any(mark in name for mark in placeholders) or (ROOT / name).exists() or _is_module(name) for name in named
    )


def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def test_the_recorded_quickstart_is_of_the_study_as_it_is() -> None:
    """It is recorded again by `python -m docs.site.record` where this fails, or where `run` takes the study for another one."""
    printed = (ROOT / RECORDED / PRINTED).read_text()
    recommendation = Recommendation.from_json((ROOT / RECORDED / "recommendation.json").read_text())
    assert recommendation.complete
    assert (
        f"\n{recommendation.answer.text('runs/quickstart')}\n\n  report:         runs/quickstart/report.html\n"
        in printed
    )
    assert (ROOT / RECORDED / ANSWER).read_text() == (answer := answer_for_a_page(ROOT / RECORDED))
    assert f"```text\n{answer}```" in (ROOT / "README.md").read_text()
    stages = [stage["type"] for stage in yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())["stages"]]
    assert re.findall(r"^done (\w+): ", printed, re.MULTILINE) == stages


def test_what_a_page_shows_is_held_against_what_is_said() -> None:
    assert agrees("batch 4 ... wins", "batch 4\nor 8 wins")
    assert agrees("one line\n  that is broken", "one line that is broken\n")
    assert agrees("done in ... s\n...", "done in 3.2 s\nand more")
    assert not agrees("batch 4 wins", "batch 8 wins")
    assert not agrees("batch 4", "batch 4 wins")


def test_every_paper_that_the_code_rests_on_is_among_the_concepts() -> None:
    paper = re.compile(r"\b\d{4}\.\d{4,5}\b(?=[,;.)\s\]:])")
    code = {
        path: path.read_text() for package in ("orchestrator", "trainers") for path in (ROOT / package).rglob("*.py")
    }
    cited = {one for text in code.values() for one in re.findall(r"(?:arXiv|;)\s+(\d{4}\.\d{4,5})", text)}
    assert len(cited) > 20
    assert cited <= set(paper.findall((ROOT / "docs" / "concepts.md").read_text()))
