"""Strangers' training scripts: how many lines each needs until batchscout answers for it, and whether the answer runs in it.

    python benchmarks/strangers.py [--at NAME=FOLDER ...] [--only NAME ...] [--until alone|plan|paste] [--work DIR] [--out FILE]

A stranger is a training script that nobody of this project wrote; strangers_of/listed.py has them. One of a package is taken from its
source distribution, which pip downloads, or from what is installed; one of a public repository from the folder that `--at` names,
whose script must be the one that was listed. No code of theirs is kept here. What a script would download is replaced by stand-ins
(strangers_of/stand_ins.py), as files where the download would have put them, else by lines of the script, which are counted apart.

They were chosen, and the list committed, before batchscout had seen any of them, by this rule; none is dropped, and failures stay.
- From packages: those whose source or wheel ships a script that trains, at most two of a package. From public repositories: the first
  training command of the README, or of the folder's, else the script of the most common kind there.
- It runs by itself here, with torch as it is, on a CPU: two optimizer steps within 120 s after nothing but its data was replaced.
- Its arguments are the README's, without what asks for a GPU, several processes or a tracker, and with the smallest sizes that its own
  flags offer where a step takes more than a second or so; a model or tokenizer that would be downloaded is a tiny one of its kind.
- At least half were not among what batchscout had been tried on while it was written; `tried` says which were.

For each, in this order, each step with a limit of its time and nothing else beside it:
- alone: its own command until the third step, to see that it trains.
- init, plan: `batchscout init` before its command, and `batchscout plan` of what that wrote. Where either fails, once
  more with the lines of the product that the list has for it (they, and what is done by hand, were found after the first try, and the
  scripts, commands and data are those of the first commit): `lines` is how many. What cannot be had is null.
- run: the study with the smallest budget that is of use: one lane, the stage `train` alone, two runs of 16 of its own batches at half
  its batch. It ends with an answer, or not.
- paste: `batchscout export --to script`, and the command that it prints, with what it says to do by hand (lines of the list), in a
  fresh copy until the third step: it trains with the rate and the batch of the answer, or not.
What is no study of one loss by one optimizer should be refused by init with that reason: `rightly refused`, in a column of its own.

The aims: 0 lines in 60 % of the studies, at most 5 in 85 %, and 90 % of the answers run where they were pasted.
Their packages are in no extra of this project: pip install torchvision torch-geometric scikit-learn tensorboardX fire matplotlib timm einops sktime
patool torchdiffeq e3nn spikingjelly trl schedulefree torch-optimizer pytorch-ignite opacus poutyne pytorch-forecasting open-clip-torch braceexpand
webdataset diffusers evaluate 'jsonargparse[signatures]', and deepctr-torch with --no-deps.
A run that was cut, or ended with another --until, goes on where it was: the steps that FILE has are not taken again. DIR keeps each
stranger's folder with all that was said.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from strangers_of.listed import STRANGERS, Change, Stranger

STEPS = 3
SHIM = Path(__file__).with_name("strangers_of") / "until_steps.py"
Step = Literal["alone", "plan", "paste"]


@dataclass(frozen=True)
class Said:
    """What a command did."""

    code: int | None
    """Its exit code; None if its time was over."""
    seconds: float
    message: str
    """The last lines of what it said."""

    @property
    def is_well(self) -> bool:
        return self.code == 0


@dataclass
class Outcome:
    """All that is known of a stranger; a line of the file."""

    name: str
    kind: str
    source: str
    tried: bool
    download_lines: int
    alone: Said | None = None
    init: Said | None = None
    plan: Said | None = None
    lines: int | None = None
    """Lines of the product until init wrote a study file and plan passed; None if they never did."""
    run: Said | None = None
    answer: dict[str, Any] = field(default_factory=dict)
    paste: Said | None = None
    pasted: bool | None = None
    """Whether the answer's command trained, with its rate and its batch; None if there was no answer."""
    by_hand: int = 0
    """Lines that the export says to change by hand."""
    verdict: str = ""
    """`answered`, `rightly refused`, or the step that failed."""


def main() -> None:
    chosen = arguments()
    known = {outcome.name: outcome for outcome in outcomes_of(chosen.out)}
    outcomes = []
    for stranger in STRANGERS:
        if chosen.only and stranger.name not in chosen.only:
            continue
        outcome = known.get(stranger.name) or new(stranger)
        if is_to_go_on(outcome, chosen.until):
            take_steps(outcome, stranger, chosen)
            with chosen.out.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
            print(json.dumps(asdict(outcome)), flush=True)
        outcomes.append(outcome)
    print(table(outcomes))
    print(json.dumps(judged(outcomes)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--at", action="append", default=[], metavar="NAME=FOLDER", help="where a public repository lies: owner/name"
    )
    parser.add_argument("--only", nargs="+", default=[], choices=[one.name for one in STRANGERS], metavar="NAME")
    parser.add_argument(
        "--until", choices=("alone", "plan", "paste"), default="paste", help="the last step that is taken"
    )
    parser.add_argument("--work", type=Path, default=Path("strangers"), help="a folder for each stranger, kept")
    parser.add_argument("--out", type=Path, help="a line for each that is done; default: outcomes.jsonl in --work")
    parser.add_argument("--sdists", type=Path, help="where pip's downloads are kept; default: sdists in --work")
    for step, seconds in (("alone", 120), ("init", 120), ("plan", 120), ("run", 600), ("paste", 120)):
        parser.add_argument(
            f"--{step}-seconds", type=float, default=seconds, help=f"the limit of {step}; default {seconds}"
        )
    chosen = parser.parse_args()
    chosen.work = chosen.work.resolve()
    chosen.work.mkdir(parents=True, exist_ok=True)
    chosen.out = chosen.out or chosen.work / "outcomes.jsonl"
    chosen.sdists = chosen.sdists or chosen.work / "sdists"
    chosen.at = dict(one.split("=", 1) for one in chosen.at)
    return chosen


def outcomes_of(file: Path) -> list[Outcome]:
    """Return what the file has; of a stranger that went on in a later run, the later line is the last one."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    steps = ("alone", "init", "plan", "run", "paste")
    return [Outcome(**line | {step: line[step] and Said(**line[step]) for step in steps}) for line in lines]


def new(stranger: Stranger) -> Outcome:
    download = sum(change.why == "download" for change in stranger.changes)
    return Outcome(stranger.name, stranger.kind, stranger.source, stranger.tried, download)


def is_to_go_on(outcome: Outcome, until: Step) -> bool:
    reached = outcome.alone is None, outcome.init is None, outcome.run is None
    return not outcome.verdict and any(reached[: ("alone", "plan", "paste").index(until) + 1])


def take_steps(outcome: Outcome, stranger: Stranger, chosen: argparse.Namespace) -> None:
    """Take every step up to `--until` that is not taken yet and that the one before allows."""
    place = chosen.work / stranger.name
    until: Step = chosen.until
    if outcome.alone is None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        fresh_copy(stranger, place / "alone", chosen, ("download",))
        outcome.alone = trained(stranger.command, stranger, place / "alone", chosen.alone_seconds, place)
    if not outcome.alone.is_well:
        outcome.verdict = "alone"
    if outcome.verdict or until == "alone":
        return

    if outcome.init is None:
        init_and_plan(outcome, stranger, place, chosen)
    if outcome.lines is None:
        outcome.verdict = why_no_plan(outcome, stranger)
    elif stranger.no_study:
        outcome.verdict = "not refused"
    if outcome.verdict or until == "plan":
        return

    study = place / "study" / stranger.folder / "study.yaml"
    outcome.run = said(
        ["batchscout", "run", study.name, "--dir", "run", *small(stranger)],
        study.parent,
        chosen.run_seconds,
        place / "run.txt",
    )
    found = study.parent / "run" / "recommendation.json"
    if not (outcome.run.is_well and found.exists()):
        outcome.verdict = "run"
        return
    wanted = ("micro_batch_size", "gradient_accumulation_steps", "learning_rate", "script")
    outcome.answer = {key: value for key, value in json.loads(found.read_text()).items() if key in wanted}
    paste(outcome, stranger, place, study.parent / "run", chosen)
    outcome.verdict = "answered" if outcome.pasted else "paste"


def why_no_plan(outcome: Outcome, stranger: Stranger) -> str:
    if outcome.init and outcome.init.code == 2 and any(word in outcome.init.message for word in stranger.no_study):
        return "rightly refused"
    return "plan" if outcome.plan else "init"


def init_and_plan(outcome: Outcome, stranger: Stranger, place: Path, chosen: argparse.Namespace) -> None:
    """Leave the folder `study` as it is after the tries: first without, then with the product's lines, if there are any."""
    for whys in (("download",), ("download", "product")):
        product = [change for change in stranger.changes if change.why == "product" and "product" in whys]
        if "product" in whys and not product:
            return
        code = fresh_copy(stranger, place / "study", chosen, whys)
        outcome.plan, number = None, len(product)
        outcome.init = said(
            ["batchscout", "init", *stranger.launcher, *stranger.command],
            code,
            chosen.init_seconds,
            place / f"init-{number}.txt",
        )
        if not outcome.init.is_well:
            continue
        outcome.plan = said(
            ["batchscout", "plan", "study.yaml"], code, chosen.plan_seconds, place / f"plan-{number}.txt"
        )
        if outcome.plan.is_well:
            outcome.lines = number
            return


def small(stranger: Stranger) -> list[str]:
    """Return what makes a study as small as is of use."""
    half = max(stranger.batch // 2, 1)
    keys = {
        "stages": "[{'type':'train','max_runs':2}]",
        "sample_budget": 16 * stranger.batch,
        "batch": f"{{'micro_batch_size':{half},'gradient_accumulation_steps':1}}",
        "evaluation_samples": min(64, 4 * stranger.batch),
        "compile": "false",
        "real_run": "null",
        "placement.lanes": 1,
    }
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


def paste(outcome: Outcome, stranger: Stranger, place: Path, run: Path, chosen: argparse.Namespace) -> None:
    exported = said(
        ["batchscout", "export", str(run), "--to", "script"],
        place,
        chosen.plan_seconds,
        place / "export.txt",
        whole=True,
    )
    lines = exported.message.strip().splitlines()
    if not exported.is_well or not lines:
        outcome.paste, outcome.pasted = exported, False
        return
    answer, words = outcome.answer, shlex.split(lines[-1])[1:]
    flags = answer["script"]["flags"]
    changes = [
        Change(one.file, one.line, one.text.format(**answer), one.why)
        for one in stranger.by_hand
        if one.why not in flags
    ]
    outcome.by_hand = len(changes)
    fresh_copy(stranger, place / "pasted", chosen, ("download",), changes)
    outcome.paste = trained(words, stranger, place / "pasted", chosen.paste_seconds, place)
    seen = json.loads((place / "pasted.json").read_text()) if (place / "pasted.json").exists() else {}
    rates, rate = [rate for step in seen.get("rates", []) for rate in step], answer["learning_rate"]
    outcome.answer |= {"command": lines[-1], "rates_seen": rates, "batches_seen": seen.get("batches", [])}
    has_rate = any(abs(one - rate) <= 1e-3 * rate for one in rates)
    has_batch = answer["micro_batch_size"] in seen.get("batches", [])
    outcome.pasted = outcome.paste.is_well and has_rate and has_batch


def fresh_copy(
    stranger: Stranger, into: Path, chosen: argparse.Namespace, whys: Sequence[str], by_hand: Sequence[Change] = ()
) -> Path:
    """Lay the stranger's code, its data and its changed lines; return the folder in which its command is typed."""
    shutil.rmtree(into, ignore_errors=True)
    source = where_it_lies(stranger, chosen)
    if source is None:
        into.mkdir()
    else:
        shutil.copytree(source, into, ignore=shutil.ignore_patterns(".git"))
    for change in [*(one for one in stranger.changes if one.why in whys), *by_hand]:
        file = into / change.file
        lines = file.read_text().splitlines(keepends=True)
        old = lines[change.line - 1]
        lines[change.line - 1] = old[: len(old) - len(old.lstrip())] + change.text + "\n"
        file.write_text("".join(lines))
    code = into / stranger.folder
    code.mkdir(parents=True, exist_ok=True)
    stranger.data(code)
    return code


def where_it_lies(stranger: Stranger, chosen: argparse.Namespace) -> Path | None:
    """Return the folder of the stranger's code, or None if what is installed has it."""
    host, what = stranger.source.split(":", 1)
    name, _, version = what.partition("==" if host != "github" else "@")
    if host == "installed":
        import importlib.metadata

        found = importlib.metadata.version(name)
        if found != version:
            raise SystemExit(
                f"{stranger.name} is of {name} {version}, and {found} is installed: pip install {name}=={version}"
            )
        return None
    folder = unpacked(name, version, chosen.sdists) if host == "sdist" else chosen.at.get(name)
    if folder is None:
        raise SystemExit(
            f"{stranger.name} lies in the public repository {name}, commit {version}: give --at {name}=FOLDER"
        )
    script = next((word for word in stranger.command if word.endswith(".py")), None)
    if script:
        found = hashlib.sha256((Path(folder) / stranger.folder / script).read_bytes()).hexdigest()[:12]
        if found != stranger.sha256:
            raise SystemExit(
                f"{folder} has another {script} ({found}) than the listed one ({stranger.sha256}): take {stranger.source}"
            )
    return Path(folder)


def unpacked(name: str, version: str, sdists: Path) -> Path:
    """Download a source distribution and unpack it, where that is not done yet."""
    into = sdists / f"{name}-{version}"
    if not into.exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            ":all:",
            "-d",
            str(sdists),
            f"{name}=={version}",
        ]
        if not any(sdists.glob(f"*-{version}.tar.gz")):
            subprocess.run(command, check=True)
        file = next(
            one for one in sdists.glob(f"*-{version}.tar.gz") if one.name.lower().replace("_", "-").startswith(name)
        )
        with tarfile.open(file) as archive:
            archive.extractall(into.with_suffix(".part"), filter="data")
        (top,) = into.with_suffix(".part").iterdir()
        top.rename(into)
        into.with_suffix(".part").rmdir()
    return into


def trained(command: Sequence[str], stranger: Stranger, code: Path, limit_seconds: float, place: Path) -> Said:
    """Run a command until its optimizer has taken so many steps; well only if it has, and then a file beside it tells how."""
    told = place / f"{code.name}.json"
    words = [sys.executable, str(SHIM), str(told), str(STEPS), *command]
    found = said(words, code / stranger.folder, limit_seconds, place / f"{code.name}.txt")
    if found.is_well and not told.exists() and not stranger.no_study:
        return Said(1, found.seconds, f"it ended before its optimizer had taken {STEPS} steps\n{found.message}")
    return found


def said(command: Sequence[str], folder: Path, limit_seconds: float, file: Path, *, whole: bool = False) -> Said:
    """Run a command by itself, with all that it starts; both of its outputs go to the file."""
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg", "COLUMNS": "200",
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    began = time.monotonic()
    with file.open("w") as out:
        error = subprocess.DEVNULL if whole else out
        process = subprocess.Popen(
            ["nice", *command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=error,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started and left
            process.wait()
    text = file.read_text(errors="replace")
    return Said(code, round(time.monotonic() - began, 1), text if whole else text[-1_500:])


def table(outcomes: list[Outcome]) -> str:
    rows = [["stranger", "kind", "tried", "download lines", "lines", "answer", "pasted", "verdict"], ["---"] * 8]
    for one in outcomes:
        answer = one.answer
        rows.append(
            [
                one.name,
                one.kind,
                "yes" if one.tried else "",
                str(one.download_lines),
                "" if one.lines is None else str(one.lines),
                f"{answer['micro_batch_size']} x {answer['gradient_accumulation_steps']}, {answer['learning_rate']:.3g}"
                if answer
                else "",
                {None: "", True: "yes", False: "no"}[one.pasted],
                one.verdict or "not ended",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def judged(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the figures: those that should have been refused are no part of the shares."""
    no_study = {one.name for one in STRANGERS if one.no_study}
    alone = [one for one in outcomes if one.verdict != "alone"]
    studies = [one for one in alone if one.name not in no_study]
    answers = [one for one in studies if one.answer]
    return {
        "strangers": len(outcomes),
        "run_by_themselves": len(alone),
        "studies": len(studies),
        "rightly_refused": sum(one.verdict == "rightly refused" for one in outcomes),
        "should_be_refused": sum(one.name in no_study for one in alone),
        "share_at_0_lines": share(one.lines == 0 for one in studies),
        "share_at_most_5_lines": share(one.lines is not None and one.lines <= 5 for one in studies),
        "share_answered": share(bool(one.answer) for one in studies),
        "share_of_answers_pasted": share(bool(one.pasted) for one in answers),
        "share_of_studies_pasted": share(bool(one.pasted) for one in studies),
        "init_seconds": middle([one.init for one in alone]),
        "plan_seconds": middle([one.plan for one in alone]),
        "run_seconds": middle([one.run for one in alone]),
    }


def share(of: Iterable[bool]) -> float | None:
    values = list(of)
    return round(sum(values) / len(values), 3) if values else None


def middle(steps: list[Said | None]) -> float | None:
    seconds = [step.seconds for step in steps if step]
    return round(statistics.median(seconds), 1) if seconds else None


if __name__ == "__main__":
    main()
