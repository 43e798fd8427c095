"""A study in Python: its figures, and what a notebook shows of it."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import batchscout
from batchscout.orchestrator.output.report.page import render_report
from batchscout.orchestrator.output.trial_rows import trial_row
from batchscout.orchestrator.study.state import Study
from tests.support.example_study import add_trial, example_config
from tests.support.outcome import GOLDEN, RECORDED


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> batchscout.Study:
    run_dir = tmp_path_factory.mktemp("study") / "quickstart"
    shutil.copytree(GOLDEN / "quickstart", run_dir)
    return batchscout.load(run_dir)


def test_every_figure_of_the_report_is_had_by_its_name_and_stands_alone(
    study: batchscout.Study, tmp_path: Path
) -> None:
    page = render_report(study.config, study.replayed, study.recommendation)
    shown = re.findall(r'<figure id="(\w+)-(\w+)"', page)
    assert ("train", "surface") in shown
    for section, name in shown:
        picture = study.figures()[f"{section}-{name}"]
        assert picture.figure.name == name
        picture.save(tmp_path / "figure.svg")
        root = ElementTree.parse(tmp_path / "figure.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.find("{http://www.w3.org/2000/svg}style") is not None
    assert study.figures()["surface"]._repr_svg_() == study.figures()["train-surface"].svg


def test_what_is_measured_with_an_error_has_a_bar_that_holds_its_point() -> None:
    recorded = batchscout.load(RECORDED)
    with_bars = {"batches", "generalisation_gap", "speed_by_memory", "speed", "coherence", "goodput"}
    for name in with_bars:
        of_the_runs = recorded.figures()[name].figure.series[0].marks
        with_bar = [(one.low, one.y, one.high) for one in of_the_runs if one.low is not None and one.high is not None]
        assert len(with_bar) >= len(of_the_runs) - (name == "speed_by_memory"), "what was timed in turns has one"
        assert all(low <= y <= high for low, y, high in with_bar), name


def test_a_figure_that_there_is_not_is_refused_with_those_that_there_are(study: batchscout.Study) -> None:
    with pytest.raises(KeyError, match=r"no figure 'surfaces'; it has: differences, surface, .*timeline"):
        study.figures()["surfaces"]


def test_a_notebook_shows_the_answer(study: batchscout.Study) -> None:
    shown = study._repr_html_()
    assert study.recommendation is not None
    lines = study.recommendation.answer.lines()
    command = lines.pop("Next")
    for label, text in lines.items():
        assert f"<dt>{label}</dt><dd>{html.escape(text, quote=False)}</dd>" in shown
    assert f"<dt>Next</dt><dd><code>{command}</code> (RUN_DIR is the folder of this report)</dd>" in shown
    assert str(study) == study.recommendation.answer.text(str(study.run_dir))
    assert "micro_batch_size" in shown
    ElementTree.fromstring(shown)


def test_a_figure_is_had_without_torch_and_ray(study: batchscout.Study) -> None:
    code = "import sys, batchscout; batchscout.load(sys.argv[1]).figures()['surface'].svg; print({'torch', 'ray'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code, str(study.run_dir)], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_study_is_read_by_its_trials_their_explanations_and_its_exports(study: batchscout.Study) -> None:
    recommendation, best = study.recommendation, study.best
    assert recommendation is not None
    assert best is not None
    assert best is study.trial(recommendation.evidence.trial)
    assert best.config.effective_batch_size == recommendation.effective_batch_size
    assert f"<trial {best.id}: complete>" == repr(best)
    told = str(study.explain(best.id))
    assert told.startswith(f"{best.id}: complete\n\nwhy it ran\n")
    assert f"per_device_train_batch_size={recommendation.micro_batch_size}" in study.export("hf")
    for wrong in (lambda: study.trial("train-m4k"), lambda: study.explain("train-m4k")):
        with pytest.raises(ValueError, match="no trial 'train-m4k'; did you mean train-m"):
            wrong()
    assert study.export() == study.export("torch")
    with pytest.raises(ValueError, match=r"'keras'; there are script, torch, hf"):
        study.export("keras")
    with pytest.raises(ValueError, match=r"did you mean hf\?"):
        study.export("huggingface")


def test_whatever_a_prompt_shows_of_a_study_is_short(study: batchscout.Study) -> None:
    assert study.best is not None
    figures = study.figures()
    for one in (study, study.recommendation, study.best, study.explain(study.best.id), figures, figures["surface"]):
        assert re.fullmatch("<.{1,400}>", repr(one))


def test_help_is_one_screen_and_names_what_a_study_offers() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "import batchscout; help(batchscout)"], capture_output=True, text=True, check=True
    ).stdout
    rows = sum(max(1, -(-len(line) // 120)) for line in said.splitlines())
    assert rows <= (52 if sys.version_info >= (3, 13) else 40)  # 3.13 gives every parameter a row
    assert all(
        f"study.{name}" in said
        for name in ("best", "trial(", "trials(", "explain(", "figures(", "export(", "recommendation")
    )


@pytest.mark.parametrize(
    "changed",
    [{"precision": "float32"}, {"compile": "whole"}, {"compile": False}, {"activation_checkpointing": "full"}],
    ids=str,
)
def test_rows_of_trials_that_train_in_other_modes_are_told_apart(changed: dict[str, Any]) -> None:
    config = example_config(precision="bfloat16")
    known = Study(config.name)
    add_trial(known, config, "frontier-a", compile=True)
    other_mode: dict[str, Any] = {"compile": True} | changed
    add_trial(known, config, "frontier-b", **other_mode)
    one, other = ({**trial_row(trial), "trial": ""} for trial in known.trials.values())
    assert one != other
