"""A run directory belongs to one study, whatever version began it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.config.keys import StudyConfig
from orchestrator.config.stages import Frontier
from orchestrator.config.trial import base_trial
from orchestrator.study.events import proposed
from orchestrator.study.run_directory import (
    as_it_began,
    logs_of,
    open_run_directory,
    put_former_try_by,
    trial_directory,
)
from orchestrator.study.trial import Proposal, Trial, TrialState
from tests.support.lane_player import study_of
from trainers.config import Compile


def begin(run_dir: Path, config: StudyConfig) -> None:
    with open_run_directory(config, run_dir) as journal:
        journal.append(proposed(Proposal("grid-m4k1", "grid", base_trial(config, None), candidate="grid-m4k1")))


def rewrite(run_dir: Path, without: tuple[str, ...] = (), **changes: Any) -> None:
    """Leave study.yaml as a version wrote it that did not have these keys."""
    path = run_dir / "study.yaml"
    tree = {key: value for key, value in yaml.safe_load(path.read_text()).items() if key not in without}
    path.write_text(yaml.safe_dump(tree | changes))


def test_a_study_begun_before_a_key_existed_goes_on_with_its_default(tmp_path: Path) -> None:
    begin(tmp_path, study_of())
    rewrite(tmp_path, without=("budget", "target_loss"))
    open_run_directory(study_of(), tmp_path).close()
    with pytest.raises(ValueError, match=r"another study:\n  budget.device_hours: absent there, 1"):
        open_run_directory(study_of(budget={"device_hours": 1}), tmp_path)


def test_a_study_of_version_0_2_goes_on_as_it_was_meant(tmp_path: Path) -> None:
    begin(tmp_path, study_of(objective="samples"))
    rewrite(tmp_path, without=("budget", "target_loss"), objective="val_loss")
    open_run_directory(study_of(objective="samples"), tmp_path).close()
    rewrite(tmp_path, objective="val_loss")
    with pytest.raises(ValueError, match="objective: samples there, time now"):
        open_run_directory(study_of(), tmp_path)


def test_a_study_begun_with_a_fixed_beta2_goes_on_with_it(tmp_path: Path) -> None:
    own = study_of().optimizer.model_dump()
    begin(tmp_path, study_of(optimizer=own | {"beta2_scaling": "none"}))
    tree = yaml.safe_load((tmp_path / "study.yaml").read_text())
    del tree["optimizer"]["beta2_scaling"]
    rewrite(tmp_path, optimizer=tree["optimizer"])
    resumed = as_it_began(study_of(), tmp_path)
    assert resumed.optimizer.beta2_scaling == "none"
    open_run_directory(resumed, tmp_path).close()
    with pytest.raises(ValueError, match=r"optimizer\.beta2_scaling: none there, samples now"):
        open_run_directory(as_it_began(study_of(optimizer=own), tmp_path), tmp_path)
    assert as_it_began(study_of(), tmp_path / "new").optimizer.beta2_scaling == "samples"


def test_a_study_of_sgd_begun_with_the_square_root_goes_on_with_it(tmp_path: Path) -> None:
    """Since then the rule that nobody names is the optimizer's own."""
    sgd = {"type": "sgd", "lr": 0.1}
    begin(tmp_path, study_of(optimizer=sgd | {"lr_scaling": "sqrt"}))
    resumed = as_it_began(study_of(optimizer=sgd), tmp_path)
    assert resumed.optimizer.lr_scaling == "sqrt"
    open_run_directory(resumed, tmp_path).close()
    assert as_it_began(study_of(optimizer=sgd), tmp_path / "new").optimizer.lr_scaling == "auto"


def test_a_study_begun_with_compiled_blocks_alone_goes_on_with_them(tmp_path: Path) -> None:
    """Since then the frontier tries the model as one graph, too, where nobody says what to compile."""
    begin(tmp_path, study_of(stages=[{"type": "frontier", "compile": [True]}]))
    left_open = study_of(stages=[{"type": "frontier"}])
    resumed = as_it_began(left_open, tmp_path)
    assert compile_of(resumed) == (True,)
    open_run_directory(resumed, tmp_path).close()
    assert compile_of(as_it_began(left_open, tmp_path / "new")) == ()
    named = study_of(stages=[{"type": "frontier", "compile": ["whole"]}])
    with pytest.raises(ValueError, match="compile"):
        open_run_directory(as_it_began(named, tmp_path), tmp_path)


def compile_of(config: StudyConfig) -> tuple[Compile, ...]:
    frontier = config.keys_of(Frontier)
    assert frontier is not None
    return frontier.compile


def test_a_file_that_no_version_wrote_is_shown_as_it_is(tmp_path: Path) -> None:
    begin(tmp_path, study_of())
    rewrite(tmp_path, bugdet=7)
    with pytest.raises(ValueError, match="bugdet: 7 there, absent now"):
        open_run_directory(study_of(), tmp_path)


HALF_A_REPORT = """
import sys
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from trainers.files import written_whole
with written_whole(Path(sys.argv[1])) as file:
    file.write(b"<html>")
    file.flush()
    print("half", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_was_writing_stays_no_longer_than_until_the_next_run(tmp_path: Path) -> None:
    """SIGKILL while the report is written: the report before it stays whole."""
    begin(tmp_path, study_of())
    (tmp_path / "report.html").write_text("<html></html>")
    command = [sys.executable, "-c", HALF_A_REPORT, str(tmp_path / "report.html")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        process.kill()
    assert len(list(tmp_path.glob(".*.partial"))) == 1
    open_run_directory(study_of(), tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lease", "journal.jsonl", "report.html", "study.yaml"]
    assert (tmp_path / "report.html").read_text() == "<html></html>"


def test_a_trial_is_tried_again_from_nothing_and_its_logs_say_which_try_they_are_of(tmp_path: Path) -> None:
    wanted = Proposal("grid-m4k1", "grid", base_trial(study_of(), None), candidate="grid-m4k1")
    trial = Trial(wanted, TrialState.FAILED)
    directory = trial_directory(tmp_path, trial.id)
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "checkpoints" / "8-token.pt").touch()
    for number in (1, 2):
        (directory / "error-rank0.log").write_text(f"{number}")
        (directory / "crash-rank1.log").write_text("")
        put_former_try_by(tmp_path, replace(trial, earlier_tries=("failed",) * (number - 1)))
    logs = {path.name for path in directory.iterdir()}
    assert logs == {f"try{number}-{name}" for number in (1, 2) for name in ("crash-rank1.log", "error-rank0.log")}
    assert (directory / "try1-error-rank0.log").read_text() == "1"
    assert logs_of(tmp_path, trial.id) == []
