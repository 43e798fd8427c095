"""Record the quickstart: `python -m docs.site.record` runs the README's first study, in minutes, and keeps for the pages what it printed
and what its report is made of. Chromium takes a picture of two charts of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import TextWrapper
from xml.etree.ElementTree import tostring

from batchscout.orchestrator.output.loaded import load
from batchscout.orchestrator.output.plots import element
from batchscout.orchestrator.output.report.figures import figure_element
from batchscout.orchestrator.output.report.shell import text_of
from docs.site.pages import RECORDED, ROOT

KEPT = ("study.yaml", "journal.jsonl", "recommendation.json", "trials/*/steps.jsonl", "trials/*/noise.jsonl")
PRINTED, ANSWER = "printed.txt", "answer.txt"
CHARTS, WINDOW = ("surface", "batches"), (740, 800)
"""What is in the picture, one under the other, and its size in pixels."""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="bs-", dir="/tmp") as name:  # short, for the sake of Ray's sockets
        home = Path(name)
        shutil.copytree(ROOT / "configs", home / "configs")
        command = [sys.executable, "-m", "batchscout", "run", "configs/quickstart.yaml"]
        # What other studies measured on this machine would be taken from their cache, and not be measured here.
        own = os.environ | {"BATCHSCOUT_CACHE": str(home / "cache")}
        done = subprocess.run(command, cwd=home, env=own, stdout=subprocess.PIPE, text=True, check=True)
        keep(home / "runs" / "quickstart", ROOT / RECORDED)
        (ROOT / RECORDED / PRINTED).write_text(done.stdout.replace(f"{home}/", ""))
        (ROOT / RECORDED / ANSWER).write_text(answer_for_a_page(ROOT / RECORDED))
        take_picture(ROOT / RECORDED, ROOT / "docs" / "report.png", home)


def answer_for_a_page(run_dir: Path) -> str:
    """Return the five lines of a study's answer, broken for a page; a command is pasted, and stays whole."""
    answer = recommendation.answer if (recommendation := load(run_dir).recommendation) else None
    assert answer, "the quickstart trains"
    wrapper = TextWrapper(92, subsequent_indent=" " * 12, break_on_hyphens=False, break_long_words=False)
    lines = answer.text("runs/quickstart").splitlines()
    return "".join(f"{line if line.startswith('   ') else wrapper.fill(line)}\n" for line in lines)


def take_picture(run_dir: Path, into: Path, scratch: Path) -> None:
    """Take a picture of charts as a study's report draws them. scratch: a folder for the page that has these alone."""
    figures = load(run_dir).figures()
    charts = [figure_element(figures[name].figure, "train") for name in CHARTS]
    style = element("style", text_of("figure.css") + text_of("style.css"))
    page = element("html", element("meta", charset="utf-8"), style, element("body", element("main", *charts)))
    file = scratch / "charts.html"
    file.write_text("<!DOCTYPE html>\n" + tostring(page, encoding="unicode", method="html"))
    size = f"--window-size={WINDOW[0]},{WINDOW[1]}"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", size, f"--screenshot={into}"]
    subprocess.run(["chromium", *options, file.as_uri()], check=True, capture_output=True)


def keep(run_dir: Path, into: Path) -> None:
    """Copy what a report is made of, in the place of an earlier record."""
    shutil.rmtree(into, ignore_errors=True)
    for pattern in KEPT:
        for path in run_dir.glob(pattern):
            kept = into / path.relative_to(run_dir)
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, kept)


if __name__ == "__main__":
    main()
