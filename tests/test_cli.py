"""The program as it is typed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from batchscout.orchestrator.config.load import load_study
from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.study.events import Concluded, RunBegan
from batchscout.orchestrator.study.journal import Journal, replay
from batchscout.trainers.files import quoted
from batchscout.trainers.lines import line_of
from tests.support.command_line import Typed
from tests.support.every import for_every
from tests.support.lane_player import Player, director_of, know
from tests.support.processes import python
from tests.support.worlds import FIELD, KNOWN, field_config, field_with_accidents, run_at

ROOT = Path(__file__).parents[1]
VERBS = ("plan", "run", "trial", "status", "report", "explain", "compare", "export", "init", "doctor", "schema")
TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"target": "gpt", "kwargs": {"num_layers": 1, "num_heads": 1, "hidden_dim": 16}},
    "data": {
        "target": "text",
        "kwargs": {"train": "train.txt", "val_fraction": 0.2, "seq_len": 16, "tokenizer": "bytes"},
    },
    "batch": {"micro_batch_size": 2, "gradient_accumulation_steps": 2},
    "sample_budget": 32,
    "evaluations": 2,
    "evaluation_samples": 4,
    "stages": [{"type": "frontier", "compile": [False], "activation_checkpointing": ["none", "full"]}],
}


def batchscout(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Another process, as a user starts it."""
    return python("-m", "batchscout", *arguments, cwd=cwd, **{"COLUMNS": "200"} | environment)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "train.txt").write_text("".join(f"line {i} of a text\n" for i in range(100)))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return tmp_path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a study of one grid, half way in."""
    config, folder = field_config(), tmp_path / "half way"
    folder.mkdir()
    (folder / "study.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with Journal(folder / "journal.jsonl", config.name) as journal:
        know(journal, found=KNOWN)
        Player(director_of(config, journal, "grid"), field_with_accidents, stop_after=20).play()
    return folder


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    """Nor does the help of any verb, nor a mistyped one."""
    code = (
        "import sys\nfrom batchscout.orchestrator.cli import main\n"
        f"for words in (['--help'], *([verb, '--help'] for verb in {VERBS}), ['rnu']):\n"
        "    try: main(words)\n"
        "    except SystemExit as ended: assert ended.code == (2 if words == ['rnu'] else 0)\n"
        "print(sorted({'torch', 'ray', 'pydantic', 'numpy', 'wandb', 'rich', 'yaml', 'transformers'} & set(sys.modules)))"
    )
    found = python("-c", code, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "[]"
    for verb in VERBS:
        assert f"usage: batchscout {verb}" in found.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--no-memory"),
        ("status",),
        ("compare", str(ROOT / "tests" / "golden" / "quickstart")),
        ("explain", run_at(max(FIELD))),
    ],
)
def test_reading_verbs_load_neither_torch_nor_ray(home: Path, run_dir: Path, arguments: tuple[str, ...]) -> None:
    argument = "tiny.yaml" if arguments[0] == "plan" else str(run_dir)
    code = (
        "import sys\nfrom batchscout.orchestrator.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "print(sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    found = python("-c", code, arguments[0], argument, *arguments[1:], cwd=home)
    assert found.stdout.splitlines()[-1] == "[]", found.stderr


def test_a_faulty_study_file_is_exit_code_2_and_one_message_in_a_real_process(home: Path) -> None:
    (home / "bad.yaml").write_text(yaml.safe_dump(TINY | {"optimiser": {"lr": 1}}))
    found = batchscout("run", "bad.yaml", cwd=home)
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr.startswith(
        "batchscout: bad.yaml does not describe a study:\n  optimiser: no such key; did you mean "
    )
    assert len(found.stderr.splitlines()) == 2
    assert not (home / "runs").exists()


@pytest.mark.parametrize(("arguments", "said"), [
    (("run", "nowhere.yaml"), "there is no study file nowhere.yaml; check the path, or let batchscout init write one"),
    (("plan", "tiny.yaml", "--set", "lr"), "--set 'lr' is not of the form key=value; write --set optimizer.lr=3e-4"),
    (("plan", "tiny.yaml", "--set", "parallel=fsdp"),
     "tiny.yaml does not describe a study:\n  parallel: fsdp shards the model over ranks, and world_size is 1; raise it, or use ddp"),
    (("trial", "tiny.yaml", "--set", "world_size=2"),
     "batchscout trial runs one rank in this process, and world_size is 2; add --set world_size=1, or use batchscout run"),
    (("status", "nowhere"), "nowhere holds no study (no study.yaml in it); check the path, or start one: batchscout run"),
    (("report", "nowhere"), "nowhere holds no study (no study.yaml in it); check the path, or start one: batchscout run"),
    (("export", "nowhere", "--to", "hf"),
     "nowhere holds no study (no study.yaml in it); check the path, or start one: batchscout run"),
    (("export", str(ROOT / "tests/golden/every_state"), "--to", "hf"),
     f"{ROOT}/tests/golden/every_state has no recommendation yet; finish the study first: batchscout run {ROOT}/tests/golden/every_state/study.yaml --dir {ROOT}/tests/golden/every_state"),
    (("export", "nowhere", "--to", "keras"),
     "batchscout export takes no 'keras' after --to; there are script, torch, hf, accelerate, lightning, trl, axolotl, torchtitan, deepspeed, nanogpt"),
    (("exprt", "nowhere"),
     "batchscout takes no 'exprt'; did you mean export? There are plan, run, trial, status, report, explain, compare, export, launch, "
     "init, doctor, schema"),
    (("launch", "slrm", "tiny.yaml"), "batchscout launch takes no 'slrm'; did you mean slurm? There are slurm, ray, kuberay"),
    (("schema", "keras"), "batchscout schema takes no 'keras'; there are study, status, recommendation"),
    (("plan", "tiny.yaml", "--sett=a=b"),
     "batchscout plan takes no '--sett'; did you mean --set? There are --help, --set, --dir, --no-memory"),
    (("plan", "my", "study.yaml"), "batchscout plan takes no 'study.yaml'; quote what has spaces in it, or leave it out"),
    (("run",), "the following arguments are required: STUDY.yaml; batchscout run --help says what it takes"),
    (("run", "tiny.yaml", "--min-nodes", "no"),
     "argument --min-nodes: 'no' is not a whole number of at least 1; batchscout run --help says what it takes"),
    (("run", "tiny.yaml", "--min-nodes", "2"),
     "--min-nodes is 2, and without --address a study has this machine alone, which is 1 node; add --address auto, or leave --min-nodes out"),
])  # fmt: skip
def test_every_verb_says_what_is_wrong_and_what_would_be_right(
    home: Path, typed: Typed, arguments: tuple[str, ...], said: str
) -> None:
    assert typed(*arguments) == (2, "", f"batchscout: {said}\n")


# Status


def test_status_json_has_exactly_the_promised_keys(run_dir: Path, typed: Typed) -> None:
    code, out, err = typed("status", str(run_dir), "--json")
    assert (code, err) == (0, "")
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert list(found) == ["name", "is_running", "stages", "trials"]
    assert found["stages"] == [{"type": "grid", "state": "running"}]
    assert {tuple(trial) for trial in found["trials"]} == {("id", "stage", "state", "reason", "config", "metrics")}
    states = {trial["state"] for trial in found["trials"]}
    assert states <= {"waiting", "running", "paused", "complete", "pruned", "failed", "out_of_memory"}
    assert len(states) > 1
    assert all(trial["reason"] for trial in found["trials"] if trial["state"] in ("pruned", "out_of_memory", "paused"))


def test_status_reads_only(run_dir: Path, typed: Typed) -> None:
    """Also while the study runs and its last line is half written."""
    with (run_dir / "journal.jsonl").open("ab") as file:
        file.write(b'{"kind": "resu')
    before = (run_dir / "journal.jsonl").read_bytes()
    code, out, _ = typed("status", str(run_dir))
    assert code == 0
    assert "grid: stopped" in out, "nobody runs it"
    assert (run_dir / "journal.jsonl").read_bytes() == before
    assert sorted(path.name for path in run_dir.iterdir()) == [".lease", "journal.jsonl", "study.yaml"]


def test_status_says_why_each_was_pruned(run_dir: Path, typed: Typed, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    _, out, _ = typed("status", str(run_dir))
    assert run_at(max(FIELD, key=lambda rate: FIELD[rate])) in out
    assert "the best 3 continue" in out


@pytest.mark.parametrize("columns", [60, 110, 250])
def test_status_keeps_every_word_and_the_width_of_the_terminal(
    run_dir: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """A reason is broken between words, beside the figures where there is room, and else below them."""
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = typed("status", str(run_dir))
    trials = replay(run_dir / "journal.jsonl", "tiny").trials.values()
    assert all(" ".join(trial.explanation_beside_state.split()) in " ".join(out.split()) for trial in trials)
    figures = {line for line in out.splitlines() if line[2:].startswith("grid-")}
    assert len(figures) == len(trials)
    commands = {
        line for line in out.splitlines() if line.startswith("  batchscout run ")
    }  # broken, none could be pasted
    assert len(commands) == 1
    assert all(len(line) <= columns for line in {*out.splitlines()} - commands - (figures if columns == 60 else set()))


@pytest.mark.parametrize("verb", ["status", "plan"])
def test_no_sentence_is_broken_where_nothing_says_how_wide_it_may_be(
    run_dir: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    given = [str(run_dir)] if verb == "status" else [str(run_dir / "study.yaml"), "--no-memory"]
    narrow = typed(verb, *given)[1]
    monkeypatch.delenv("COLUMNS")
    whole = typed(verb, *given)[1]
    assert len(whole.splitlines()) < len(narrow.splitlines())
    assert whole.split() == narrow.split()


def test_a_study_that_is_over_is_shown_once_to_who_watches_it(typed: Typed) -> None:
    over = str(Path(__file__).parent / "golden" / "quickstart")
    assert typed("status", over, "--watch") == typed("status", over)


def test_what_was_running_when_the_driver_ended_has_stopped(run_dir: Path, typed: Typed) -> None:
    """Programs are told by a key of its own whether anything runs: the states stay those of the journal."""
    running = [
        trial.id for trial in replay(run_dir / "journal.jsonl", "tiny").trials.values() if trial.state == "running"
    ]
    assert running

    def told() -> tuple[str, str, str, bool]:
        status, explained = (
            typed("status", str(run_dir))[1],
            typed("explain", str(run_dir), running[0])[1],
        )
        typed("report", str(run_dir))
        report = (run_dir / "report.html").read_text()
        return status, explained, report, json.loads(typed("status", str(run_dir), "--json")[1])["is_running"]

    status, explained, report, is_running = told()
    assert not is_running
    assert " running" not in status
    assert ">running<" not in report
    assert ">stopped<" in report
    assert f"{running[0]}: stopped" in explained
    with Journal(run_dir / "journal.jsonl", "tiny"):
        status, explained, report, is_running = told()
    assert is_running
    assert ">running<" in report
    assert " stopped" not in status
    assert "grid: running" in status
    assert f"{running[0]}: running" in explained


@pytest.mark.parametrize("words", [(), ("launch",)])
def test_without_a_verb_the_help_is_shown(typed: Typed, words: tuple[str, ...]) -> None:
    assert typed(*words) == typed(*words, "--help")
    assert "example:" in typed()[1]


def test_status_says_how_to_go_on_with_a_study_that_nobody_runs_unless_it_is_over(run_dir: Path, typed: Typed) -> None:
    idle = f"batchscout run {quoted(run_dir)}/study.yaml --dir {quoted(run_dir)}"
    assert idle in typed("status", str(run_dir))[1]
    with Journal(run_dir / "journal.jsonl", "tiny") as journal:
        assert idle not in typed("status", str(run_dir))[1]
        journal.append(RunBegan(token="elsewhere", cluster_options=("--address", "auto")))
    assert f"{idle} --address auto\n" in typed("status", str(run_dir))[1]
    with Journal(run_dir / "journal.jsonl", "tiny") as journal:
        journal.append(Concluded(stage="frontier", ok=False, reason="nothing fits"))
    assert idle not in typed("status", str(run_dir))[1], "running it again would not change that"


def test_a_study_without_a_recommendation_has_a_report_too(run_dir: Path, typed: Typed) -> None:
    code, out, _ = typed("report", str(run_dir))
    assert (code, out) == (0, f"'{run_dir}/report.html'\n"), "a space is in its name"
    assert (run_dir / "report.html").read_text().startswith("<!")
    assert not (run_dir / "recommendation.json").exists()


def test_two_studies_are_compared_beside_the_second_ones_report(run_dir: Path, tmp_path: Path, typed: Typed) -> None:
    other = tmp_path / "another"
    shutil.copytree(run_dir, other)
    code, out, _ = typed("report", str(run_dir), str(other))
    assert code == 0
    assert out.splitlines() == [
        f"There is nothing to compare yet: no recommendation in {run_dir.name} and another.",
        f"{other}/comparison.html",
    ]
    assert (other / "comparison.html").read_text().endswith("</html>\n")
    assert not (run_dir / "comparison.html").exists()


@pytest.mark.parametrize("verb", ["report", "compare"])
def test_a_study_is_not_compared_with_itself(verb: str, run_dir: Path, typed: Typed) -> None:
    code, _, err = typed(verb, str(run_dir), str(run_dir))
    assert code == 2
    assert "is given twice; to compare, give the run directories of two studies" in err


# What users wrote, on a terminal

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31mred\rover\u202eback"
SPELLED_OUT = r"\x1b]0;owned\x07\x1b[2J\x9b31mred\rover\u202eback"


def acting_on_a_terminal(text: str) -> set[str]:
    return set(text) & {"\x1b", "\x07", "\x9b", "\r", "\u202e"}


@pytest.mark.slow
def test_control_characters_of_an_exception_reach_no_terminal_from_a_journal(run_dir: Path, typed: Typed) -> None:
    """A journal that another version wrote, or another person."""
    said = {
        "version": 1,
        "time": 1.0,
        "kind": "concluded",
        "stage": "grid",
        "ok": False,
        "reason": f"it said: {HOSTILE}",
    }
    with (run_dir / "journal.jsonl").open("ab") as file:
        file.write(line_of(json.dumps(said, separators=(",", ":")).encode()))
    for arguments in (("status", str(run_dir)), ("run", str(run_dir / "study.yaml"), "--dir", str(run_dir))):
        _, out, err = typed(*arguments)
        assert acting_on_a_terminal(out + err) == set()
        assert f"it said: {SPELLED_OUT}" in out + err


HOSTILE_MODEL = f"def model(**kwargs):\n    raise KeyError({HOSTILE!r}) from RuntimeError({HOSTILE!r})\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "raised", "code"),
    [("run", "Loud", 2), ("trial", "Loud", 1), ("run", "SystemExit", 2), ("trial", "SystemExit", 2)],
)
def test_control_characters_of_an_exception_reach_no_terminal_from_the_users_code(
    home: Path, verb: str, raised: str, code: int
) -> None:
    """Neither in the sentence of `run`, nor in the traceback of `trial`, nor in what the code has to say as it exits."""
    raising = HOSTILE_MODEL.replace("KeyError", raised) + "class Loud(Exception):\n    pass\n"
    (home / "hostile.py").write_text(raising)
    done = batchscout(verb, "tiny.yaml", "--set", "model.target=hostile:model", "--set", "model.kwargs={}", cwd=home)
    assert done.returncode == code
    assert acting_on_a_terminal(done.stdout + done.stderr) == set()
    assert r"\x1b]0;owned\x07\x1b[2J" in done.stderr


def test_printed_paths_can_be_pasted(run_dir: Path, typed: Typed) -> None:
    """Here with a space, a quotation mark and a bell."""
    there = run_dir.rename(run_dir.with_name("it's\x07 here"))
    with Journal(there / "journal.jsonl", "tiny") as journal:
        journal.append(Concluded(stage="grid", ok=True, reason="done"))
    _, out, err = typed("run", str(there / "study.yaml"), "--dir", str(there))
    (line,) = [line for line in (out + err).splitlines() if "report:" in line]
    pasted = subprocess.run(["bash", "-c", f"ls -d {line.partition('report:')[2]}"], capture_output=True, text=True)
    assert pasted.stdout == f"{there}/report.html\n"
    assert typed("report", str(there))[1].strip() == line.partition("report:")[2].strip()


# Plan


def test_plan_shows_stages_trials_and_what_is_skipped_and_starts_nothing(home: Path, typed: Typed) -> None:
    grid = {"type": "grid", "micro_batch_size": [4, 6], "effective_batch_size": [24, 32]}
    (home / "grid.yaml").write_text(yaml.safe_dump(TINY | {"stages": [grid]}))
    code, out, err = typed("plan", "grid.yaml", "--no-memory")
    assert (code, err) == (0, "")
    for name in ("grid-m4k6-none", "grid-m4k8-none", "grid-m6k4-none"):
        assert name in out
    assert "skipped: effective_batch_size (32) is not a multiple of micro_batch_size x world_size (6 x 1 = 6)" in out
    assert "at most 3 full runs of the time in which the baseline takes 32 samples" in out
    assert "cost:" not in out
    _, out, _ = typed("plan", "grid.yaml")
    assert "cost: at most" in out
    assert not (home / "runs").exists()


@pytest.mark.slow
def test_what_a_models_library_draws_while_it_loads_is_in_no_log(home: Path) -> None:
    (home / "loads.py").write_text(
        "from tqdm import tqdm\nfrom batchscout.trainers.model.gpt import GPT\n"
        "def model(vocab_size):\n    for _ in tqdm(range(3), desc='Loading weights'): pass\n    return GPT(vocab_size=vocab_size, seq_len=16, num_layers=1, num_heads=1, hidden_dim=16)\n"
    )
    (home / "loads.yaml").write_text(yaml.safe_dump(TINY | {"model": {"target": "loads:model"}}))
    found = batchscout("plan", "loads.yaml", cwd=home)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.slow
def test_plan_predicts_the_memory_of_every_mode(home: Path, typed: Typed) -> None:
    stage = {"type": "frontier", "activation_checkpointing": ["none", "full"], "seq_len": [64]}
    (home / "lengths.yaml").write_text(yaml.safe_dump(TINY | {"stages": [stage]}))
    code, out, err = typed("plan", "lengths.yaml", "--set", "memory_limit=32MiB")
    assert (code, err) == (0, "")
    modes = ("none", "none-T64", "full", "full-T64")
    table = out[out.index("predicted peak memory") :]
    rows = {words[0]: words for line in table.splitlines() if (words := line.split()) and words[0] in modes}
    assert set(rows) == set(modes)
    largest, with_headroom = ([int(rows[mode][place]) for mode in modes] for place in (-2, -1))
    assert 8 < largest[0] < largest[2]
    assert [largest[0] / largest[1], largest[2] / largest[3]] == pytest.approx([4, 4], abs=0.2), "16 tokens by default"
    assert all(less < more for less, more in zip(with_headroom, largest, strict=True))
    assert not (home / "runs").exists()


@pytest.mark.slow
def test_plan_refuses_a_length_that_the_data_cannot_have(home: Path, typed: Typed) -> None:
    stage = {"type": "frontier", "seq_len": [1_000_000]}
    (home / "long.yaml").write_text(yaml.safe_dump(TINY | {"stages": [stage]}))
    code, _, err = typed("plan", "long.yaml")
    assert code == 2
    assert "one sample needs seq_len + 1 = 1000001; give more text or lower data.kwargs.seq_len" in err


@pytest.mark.slow
def test_plan_says_where_it_has_only_a_bound_or_nothing_to_predict(home: Path, typed: Typed) -> None:
    modes = yaml.safe_dump(TINY | {"stages": [{"type": "frontier", "activation_checkpointing": ["none", 0.5]}]})
    (home / "budget.yaml").write_text(modes)
    _, out, _ = typed("plan", "budget.yaml")
    rows = dict(re.findall(r"^ *(none|0\.5 \(<= none\)) +(.*?) *$", out, re.MULTILINE))
    assert rows["none"] == rows["0.5 (<= none)"] != ""
    _, out, err = typed("plan", "budget.yaml", "--set", "loss=tests.support.studies:reading_a_value")
    assert "not predictable" in out
    said = " ".join(out.split())
    assert said.count("memory cannot be predicted for this model: a training step of it reads a tensor's values") == 1
    assert re.search(r"\(item\(\), or a condition on a tensor, in \S*studies\.py, line \d+\)", said)
    assert "so the search for the largest micro-batch goes by measured peaks alone, and takes a few more probes" in said
    assert err == ""


# The peaks of the allocator itself, as the profiler saw its events (MiB).
MEASURED = {"none": (101.3, 222.9, 709.3), "full": (97.1, 162.8, 468.9)}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MEASURED)
def test_predicted_peaks_are_those_that_the_allocator_was_measured_at(
    home: Path, mode: Literal["none", "full"]
) -> None:
    from batchscout.trainers.before.prediction import PROCESS_BYTES, predict
    from batchscout.trainers.config import DataConfig, ModelConfig, TrialConfig

    text = {"train": str(home / "train.txt"), "seq_len": 256, "tokenizer": "bytes", "val_fraction": 0.3}
    config = TrialConfig(
        model=ModelConfig(target="gpt", kwargs={"vocab_size": 8192, "num_layers": 4, "num_heads": 4, "hidden_dim": 256}),
        data=DataConfig(target="text", kwargs=text),
        micro_batch_size=1,
        activation_checkpointing=mode,
        learning_rate=1e-3,
        sample_budget=16,
        statistics=False,
    )  # fmt: skip
    predicted = predict(config).raised_by(-PROCESS_BYTES)
    assert [predicted.bytes_at(size) / 2**20 for size in (1, 4, 16)] == pytest.approx(MEASURED[mode], rel=1e-3)


def test_flops_of_a_sample_are_six_per_multiplying_weight_and_token_and_attentions_own(home: Path) -> None:
    from batchscout.trainers.speed.flops import flops_per_sample

    config = base_trial(load_study(home / "tiny.yaml", []), None)
    weights = 256 * 16 + 12 * 16 * 16  # the head, tied to the embedding, and one block
    tokens = TINY["data"]["kwargs"]["seq_len"]
    assert flops_per_sample(config) == 6 * weights * tokens + 12 * tokens**2 * 16


@pytest.mark.slow
def test_accumulation_holds_one_gradient_more(home: Path) -> None:
    from batchscout.trainers.before.prediction import predict

    config = base_trial(load_study(home / "tiny.yaml", ["batch.gradient_accumulation_steps=1"]), None)
    once, twice, often = (
        predict(config.model_copy(update={"gradient_accumulation_steps": steps})).bytes_at(8) for steps in (1, 2, 8)
    )
    parameters = 256 * 16 + 16 * 16 + 12 * 16 * 16 + 6 * 16  # tied embedding, positions, one block, norms
    assert 0.9 * 4 * parameters < twice - once < 1.1 * 4 * parameters
    assert often == twice


# Trial


@pytest.mark.parametrize(
    ("launch", "written"),
    [
        (("slurm", "--dry-run"), "tiny.sbatch"),
        (("kuberay", "--image=batchscout:1", "--claim=runs"), "tiny.rayjob.yaml"),
    ],
)
def test_what_becomes_of_earlier_trials_is_said_on_the_cluster_too(
    home: Path, typed: Typed, launch: tuple[str, ...], written: str
) -> None:
    scheduler, *options = launch
    code, *_ = typed("launch", scheduler, "tiny.yaml", *options, "--retry-failed", "--keep-finished")
    assert code == 0
    assert "--retry-failed --keep-finished" in " ".join((home / "runs" / written).read_text().split())


def test_trial_is_one_run_in_this_process_and_a_second_call_goes_on(home: Path, typed: Typed) -> None:
    code, out, err = typed("trial", "tiny.yaml")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["16", "32"]
    assert all("val loss" in line for line in lines)
    checkpoints = list(home.glob("runs/tiny-trial/*/checkpoints/*.pt"))
    assert [path.name.split("-")[0] for path in checkpoints] == ["000000000032"]
    code, again, _ = typed("trial", "tiny.yaml")
    assert code == 0
    assert again.splitlines()[-1].split()[:5] == lines[-1].split()[:5], "the same end, and no step in between"
    assert len(again.splitlines()) == 1


def test_another_configuration_does_not_go_on_from_the_first_ones_checkpoint(home: Path, typed: Typed) -> None:
    assert typed("trial", "tiny.yaml")[0] == 0
    code, out, _ = typed("trial", "tiny.yaml", "--set", "model.kwargs.num_layers=2")
    assert (code, len(out.splitlines())) == (0, 2)


def test_trial_leaves_the_studys_own_directory_to_run(home: Path, typed: Typed) -> None:
    assert typed("trial", "tiny.yaml")[0] == 0
    code, _, err = typed("run", "tiny.yaml", "--set", "loss=nowhere:loss")
    assert code == 2
    assert "no module named 'nowhere'" in err


@for_every(closed=[">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_changes_no_exit_code_and_no_file_gets_its_number(closed: str, run_dir: Path) -> None:
    """What a library prints would be written into that file."""
    opens = (
        "import os; from batchscout.orchestrator.terminal import *; open_closed_streams(); exit(os.open('/', 0) < 3)"
    )
    for words in (["-m", "batchscout", "report", str(run_dir)], ["-c", opens]):
        command = ["bash", "-c", f"exec {shlex.join([sys.executable, *words])} {closed}"]
        assert subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60).returncode == 0


@for_every(verb=["status", "explain", "schema"])
def test_a_log_on_a_full_disk_is_named(verb: str, run_dir: Path) -> None:
    told = {"status": [str(run_dir)], "explain": [str(run_dir), run_at(max(FIELD))], "schema": ["study"]}[verb]
    command = shlex.join([sys.executable, "-m", "batchscout", verb, *told])
    settings = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", f"{command} > /dev/full"], env=settings, capture_output=True, text=True)
    said = "batchscout: stdout could not be written: No space left on device; print to another place, and run the same command again\n"
    assert (done.returncode, done.stderr) == (1, said)


@for_every(verb=["status", "plan", "run", "doctor"])
def test_a_directory_that_is_gone_is_named_by_every_verb(verb: str) -> None:
    with tempfile.TemporaryDirectory() as here:
        words = shlex.join([sys.executable, "-m", "batchscout", verb, *([] if verb == "doctor" else ["study.yaml"])])
        command = ["bash", "-c", f"cd {here} && rmdir {here} && {words}; code=$?; mkdir {here}; exit $code"]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    said = "batchscout: the current directory is gone (No such file or directory); cd to one that is there\n"
    assert (done.returncode, done.stderr) == (2, said)


REMOVED_MEANWHILE = """
import os, sys
from pathlib import Path
from batchscout.orchestrator import cli

def plan(arguments):  # as somebody may, while Ray starts
    os.rmdir(os.getcwd())
    os.path.abspath(os.curdir)

sys.argv = ["batchscout", "plan", "study.yaml"]
cli.plan = plan
cli.program()
"""


def test_a_directory_that_is_removed_while_a_library_asks_where_it_is_is_told_in_one_line(tmp_path: Path) -> None:
    (folder := tmp_path / "removed").mkdir()
    done = python("-c", REMOVED_MEANWHILE, cwd=folder)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert "the current directory is gone" in done.stderr
    assert "cd to one that is there, and run the same command again" in done.stderr


def test_a_terminal_that_lacks_a_letter_hides_no_result(run_dir: Path, tmp_path: Path) -> None:
    """As with LC_ALL=en_US.ISO-8859-1 or PYTHONIOENCODING=ascii."""
    named = run_dir.rename(tmp_path / "Pr\u00fcfung")
    done = batchscout("report", str(named), cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"'{tmp_path}/Pr\\xfcfung/report.html'\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (300 * "x", "File name too long"),
        ("/proc/x", "No such file or directory"),
        ("tiny.yaml/x", "Not a directory"),
    ],
)
def test_a_directory_that_cannot_be_made_is_named_before_anything_starts(home: Path, given: str, says: str) -> None:
    done = batchscout("run", "tiny.yaml", "--dir", given, cwd=home)
    assert done.returncode == 2
    assert done.stderr == f"batchscout: {home / given} cannot hold a study: {says}; choose another --dir\n"


@pytest.mark.parametrize("verb", [["status"], ["report"], ["export", "--to", "hf"]])
def test_a_run_directory_that_cannot_be_looked_into_is_named_with_the_reason(verb: list[str], typed: Typed) -> None:
    run_dir = "x" * 300
    file = "recommendation.json" if verb[0] == "export" else "study.yaml"
    said = f"batchscout: {run_dir}/{file} could not be read: File name too long; fix that, and run the same command again\n"
    assert typed(*verb, run_dir) == (1, "", said)


def test_what_users_code_prints_while_a_study_is_planned_is_in_a_file_that_is_named(home: Path) -> None:
    (home / "loud.py").write_text(
        "import sys\nimport torch\nfrom torch.utils.data import TensorDataset\nprint('imported')\n"
        "class Loud(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(2, 2)\n        print('a line\\n' * 700, file=sys.stderr)\n"
        "def data():\n    print('data')\n    return TensorDataset(torch.ones(8, 2), torch.ones(8, 2)), TensorDataset(torch.ones(8, 2), torch.ones(8, 2))\n"
    )
    tree = {
        "model": {"target": "loud:Loud"},
        "data": {"target": "loud:data"},
        "loss": "mse",
        "stages": [{"type": "train"}],
        "compile": False,
    }
    (home / "loud.yaml").write_text(yaml.safe_dump(tree))
    found = batchscout("plan", "loud.yaml", cwd=home)
    assert found.returncode == 0, found.stderr
    assert "a line" not in found.stdout + found.stderr
    (path,) = re.findall(r"printed \(\d+ lines\) is in (\S+)", found.stderr)
    said = Path(path).read_text()
    Path(path).unlink()
    assert said.count("a line") >= 700
    assert "data" in said


def test_what_is_typed_in_the_place_of_another_is_answered_with_what_to_type(
    home: Path, run_dir: Path, typed: Typed
) -> None:
    assert "did you mean hf?" in typed("export", str(run_dir), "--to", "huggingface")[2]
    code, _, said = typed("run", str(run_dir))
    assert code == 2
    assert said.endswith(f"write '{run_dir}/study.yaml' --dir '{run_dir}' in its place\n"), "of whichever verb"
    for words in (
        ("status", "tiny.yaml"),
        ("report", "tiny.yaml"),
        ("export", "tiny.yaml", "--to", "hf"),
        ("explain", "tiny.yaml", "a"),
    ):
        code, _, said = typed(*words)
        assert code == 2
        assert "tiny.yaml is a file, and what a study has come to is in its run directory" in said


@pytest.mark.parametrize(("arguments", "remedy"), [
    ("run s.yaml --resume", "run goes on by itself with what is there; leave it out"),
    ("run s.yaml --lr 1e-3", "write --set optimizer.lr=1e-3"),
    ("run --lr=1e-3 s.yaml", "write --set optimizer.lr=1e-3"),
    ("plan s.yaml --batch-size 8", "write --set batch.effective_batch_size=8"),
    ("run s.yaml --budget 2h", "write --set budget.device_hours=2"),
    ("run s.yaml --seeds 3", "write --set 'seeds=[0, 1, 2]'"),
    ("run s.yaml --seed 3", "write --set 'seeds=[3]'"),
    ("run s.yaml --bf16", "write --set precision=bfloat16"),
    ("run s.yaml --epochs 3", "write --set sample_budget=SAMPLES (in samples: epochs x training samples, steps x batch)"),
    ("run s.yaml --lr", "write --set optimizer.lr=..."),
    ("run s.yaml --out x", "did you mean --dir? There"),
    ("run s.yaml --output-dir x", "did you mean --dir? There"),
    ("run s.yaml --verbosely", "there are --help, --set"),
    ("launch slurm s.yaml --lr 1", "write --set optimizer.lr=1"),
    ("plan s.yaml optimizer.lr=3e-4", "write --set optimizer.lr=3e-4"),
    ("export runs/s hf", "write --to hf"),
    ("export runs/s transformers", "write --to hf"),
    ("export runs/s --format hf", "did you mean --to? There"),
    ("continue runs/s", "did you mean run? There"),
    ("watch runs/s", "did you mean status --watch? There"),
    ("help", "did you mean --help? There"),
])  # fmt: skip
def test_a_command_of_habit_is_answered_with_the_one_to_type(typed: Typed, arguments: str, remedy: str) -> None:
    code, _, said = typed(*arguments.split())
    assert (code, remedy in said) == (2, True), said
