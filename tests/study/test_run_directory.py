"""A run directory belongs to one study, whatever version began it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.load import load_study, written_yaml
from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import RunBegan, proposed
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.run_directory import (
    as_it_began,
    discard_what_nobody_needs,
    keys_given,
    load_stored_study,
    logs_of,
    open_run_directory,
    put_former_try_by,
    refuse_other_study,
    trial_directory,
)
from batchscout.orchestrator.study.trial import Proposal, Trial, TrialState
from tests.support.lane_player import study_of
from tests.support.processes import next_line


def run_of(config: StudyConfig) -> Proposal:
    return Proposal("grid-m4k1", "grid", base_trial(config, None), candidate="grid-m4k1")


def begin(run_dir: Path, config: StudyConfig) -> None:
    with open_run_directory(config, run_dir) as journal:
        journal.append(RunBegan(token="first", given=config.model_dump(mode="json", exclude_unset=True)))
        journal.append(proposed(run_of(config)))


def rewrite(run_dir: Path, without: tuple[str, ...] = (), **changes: Any) -> None:
    """Leave study.yaml as a version wrote it that did not have these keys."""
    path = run_dir / "study.yaml"
    tree = {key: value for key, value in yaml.safe_load(path.read_text()).items() if key not in without}
    path.write_text(yaml.safe_dump(tree | changes))


def test_a_study_begun_before_a_key_existed_goes_on_with_its_default(tmp_path: Path) -> None:
    begin(tmp_path, study_of())
    rewrite(tmp_path, without=("useful_gain", "target_loss"))
    open_run_directory(study_of(), tmp_path).close()
    with pytest.raises(ValueError, match=r"another study:\n  useful_gain: 0.03 there, 0.1 now"):
        open_run_directory(study_of(useful_gain=0.1), tmp_path)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"optimizer": {"type": "sgd", "lr": 0.1}},
        {"optimizer": "adafactor"},
        {"optimizer": {"target": "torch.optim:NAdam", "kwargs": {"momentum_decay": 0.1}}},
        {"schedule": "cosine", "stages": ["frontier", {"type": "train", "max_runs": 4}], "loss": "cross_entropy"},
        {
            "batch": {"micro_batch_size": 2},
            "stages": [{"type": "train", "pruner": {"type": "none"}}],
            "real_run": {"samples": 10**6},
        },
    ],
)
def test_its_study_file_gives_to_another_study_what_it_was_given_itself(tmp_path: Path, keys: dict[str, Any]) -> None:
    """study.yaml has all keys, and the answer names it as the file of a longer study: what nobody gave counts as left open there, too."""
    first = tmp_path / "first.yaml"
    first.write_text(yaml.safe_dump({"name": "one", "model": {"target": "a:b"}, "data": {"target": "a:c"}} | keys))
    config = load_study(first, [])
    given = config.model_dump(mode="json", exclude_unset=True)
    with open_run_directory(config, tmp_path / "run") as journal:
        journal.append(RunBegan(token="first", given=given, told=("it differs in its length",)))
    file, told = tmp_path / "run" / "study.yaml", list[str]()
    assert load_study(file, []) == config, "read as any other file, it is the same study"
    found = load_study(file, ["sample_budget=70000"], given=lambda path: keys_given(path, told.append))
    assert found.model_dump(mode="json", exclude_unset=True) == given | {"sample_budget": 70_000}
    assert told == ["it differs in its length"]
    rewrite(tmp_path / "run", useful_gain=0.07)
    assert keys_given(file, told.append) == given | {"useful_gain": 0.07}, "what was changed by hand is given"


TRAIN = {"type": "train", "max_runs": 4}


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": {"device_hours": 2}},
        {"tracking": {"tensorboard": True}},
        {"placement": {"lanes": 2, "idle_release_seconds": 5}},
        {"stages": [TRAIN | {"max_runs": 8}]},
        {"stages": [TRAIN, {"type": "learning_rate"}]},
        {"real_run": {"samples": 10**6}},
    ],
)
def test_what_only_says_when_it_stops_or_where_it_runs_may_change(tmp_path: Path, changes: dict[str, Any]) -> None:
    before, now = study_of(stages=[TRAIN]), study_of(**({"stages": [TRAIN]} | changes))
    begin(tmp_path, before)
    told = list[StudyConfig]()
    open_run_directory(as_it_began(now, tmp_path), tmp_path, None, lambda then, _: told.append(then)).close()
    assert told == [before]
    assert load_stored_study(tmp_path / "study.yaml") == now
    open_run_directory(now, tmp_path, None, lambda then, _: told.append(then)).close()
    assert told == [before], "nothing has changed since"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget": {"device_hours": 2}, "seeds": [1]}, r"study:\n  seeds.0: 0 there, 1 now\n"),
        ({"stages": [{"type": "grid"}, TRAIN]}, "stages.0.type: train there, grid now"),
        ({"stages": [TRAIN | {"pruner": {"type": "none"}}]}, "stages.0.pruner.type: asha there, none now"),
        ({"placement": {"cpus_per_rank": 2}}, "placement.cpus_per_rank: None there, 2 now"),
        ({"real_run": {"samples": 10**7}}, "real_run.samples: 1000000 there, 10000000 now"),
    ],
)
def test_what_trials_are_made_with_and_judged_by_may_not_change(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    first = {"stages": [TRAIN], "real_run": {"samples": 10**6}}
    begin(tmp_path, study_of(**first))
    text = (tmp_path / "study.yaml").read_text()
    with pytest.raises(ValueError, match=said):
        open_run_directory(study_of(**(first | changes)), tmp_path, None, lambda *_: pytest.fail("it does not go on"))
    assert (tmp_path / "study.yaml").read_text() == text


def test_until_its_journal_says_so_a_study_is_as_it_was(tmp_path: Path) -> None:
    """A driver that dies in between finds the same change again."""
    begin(tmp_path, study_of())

    def dies(before: StudyConfig, journal: Journal) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_run_directory(study_of(budget={"device_hours": 2}), tmp_path, None, dies)
    assert load_stored_study(tmp_path / "study.yaml").budget is None


def begun_with(run_dir: Path, config: StudyConfig, key: str, default: Any) -> None:
    """Begin a study with a version that has another default for this key, which the study file leaves open."""
    begin(run_dir, config)
    tree = yaml.safe_load((run_dir / "study.yaml").read_text())
    *parents, last = key.split(".")
    within = tree
    for name in parents:
        within = within[int(name) if name.isdigit() else name]
    assert within[last] != default
    within[last] = default
    rewrite(run_dir, **tree)


@pytest.mark.parametrize(
    ("key", "default"), [("seeds", [0, 1]), ("optimizer.beta2_scaling", "none"), ("stages.0.rounds", 5)]
)
def test_a_study_goes_on_with_the_defaults_that_it_began_with(tmp_path: Path, key: str, default: Any) -> None:
    config = study_of(optimizer={"lr": 1e-3}, stages=[{"type": "frontier", "steps": 9}])
    begun_with(tmp_path, config, key, default)
    resumed = as_it_began(config, tmp_path)
    open_run_directory(resumed, tmp_path).close()
    with pytest.raises(ValueError, match=re.escape(key)):
        open_run_directory(config, tmp_path)
    assert as_it_began(config, tmp_path / "new") == config


def test_a_key_that_the_study_began_with_and_that_is_gone_from_its_file_is_another_study(tmp_path: Path) -> None:
    begin(tmp_path, study_of(seeds=[3, 4], optimizer={"lr": 1e-3, "weight_decay": 0.3}))
    for changed, said in (
        (study_of(optimizer={"lr": 1e-3, "weight_decay": 0.3}), r"seeds\.0: 3 there, 0 now"),
        (study_of(seeds=[3, 4], optimizer={"lr": 1e-3}), r"optimizer\.weight_decay: 0\.3 there"),
        (
            study_of(seeds=[3, 4], optimizer={"lr": 1e-3, "weight_decay": 0.3, "beta2_scaling": "none"}),
            "beta2_scaling: samples there",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            open_run_directory(as_it_began(changed, tmp_path), tmp_path)


def test_until_its_first_trial_a_study_may_change(tmp_path: Path) -> None:
    with open_run_directory(study_of(seeds=[3, 4]), tmp_path) as journal:
        journal.append(RunBegan(token="first", given={"seeds": [3, 4]}))
    assert as_it_began(study_of(), tmp_path) == study_of()


def test_the_folder_of_the_users_own_study_file_is_no_run_directory_where_that_would_be_written_over(
    tmp_path: Path,
) -> None:
    file, config = tmp_path / "study.yaml", study_of()
    text = "# what I found out about the rate\n" + written_yaml(config.model_dump(mode="json"))
    file.write_text(text)
    for refuse in (open_run_directory, refuse_other_study):
        with pytest.raises(ValueError, match=re.escape(f"{file} is a study file, and no study has begun beside it")):
            refuse(study_of(useful_gain=0.1), tmp_path)
    assert [*tmp_path.iterdir()] == [file]
    open_run_directory(config, tmp_path).close()
    assert file.read_text() == text, "the same study is not written again"


def test_a_file_that_no_version_wrote_is_shown_as_it_is(tmp_path: Path) -> None:
    begin(tmp_path, study_of())
    rewrite(tmp_path, bugdet=7)
    with pytest.raises(ValueError, match="bugdet: 7 there, absent now"):
        open_run_directory(study_of(), tmp_path)


HALF_A_REPORT = """
import sys
from pathlib import Path
from batchscout.trainers.files import written_whole
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
        assert next_line(process) == b"half\n"
        process.kill()
    assert len(list(tmp_path.glob(".*.partial"))) == 1
    open_run_directory(study_of(), tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lease", "journal.jsonl", "report.html", "study.yaml"]
    assert (tmp_path / "report.html").read_text() == "<html></html>"


@pytest.mark.parametrize(
    ("state", "cause", "keeps"),
    [
        (TrialState.COMPLETE, None, True),
        (TrialState.PRUNED, Cause.BUDGET, True),
        (TrialState.PRUNED, Cause.RUNG, False),
    ],
)
def test_a_concluded_stage_keeps_the_checkpoints_that_somebody_may_want(
    tmp_path: Path, state: TrialState, cause: Cause | None, keeps: bool
) -> None:
    """A larger budget lets go on what the budget has stopped."""
    trial = Trial(run_of(study_of()), state, cause)
    checkpoint = trial_directory(tmp_path, trial.id) / "checkpoints" / "8-token.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    discard_what_nobody_needs(tmp_path, [trial])
    assert checkpoint.exists() == keeps


def test_a_trial_is_tried_again_from_nothing_and_its_logs_say_which_try_they_are_of(tmp_path: Path) -> None:
    trial = Trial(run_of(study_of()), TrialState.FAILED)
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
