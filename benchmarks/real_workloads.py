"""Strangers' training: public programs with the answer's settings against themselves with their authors'.

    python benchmarks/real_workloads.py --at OWNER/NAME=FOLDER ... [--only NAME ...] [--seeds 3] [--work DIR] [--quick]

workloads_of/listed.py has the programs, the rule by which they were chosen, and each one's recipe with the place
where its authors argue for it. Their code lies in folders that `--at` names, at the commits of the list, or in
packages of that version; none of it is kept here. For each:
- alone: the program to its end as it is typed there; its validation loss over training seconds, of which evaluations
  are no part.
- study: `batchscout init` before the same command, `batchscout run` of what that wrote, `batchscout export`. Its cost
  is what its lanes were held.
- rate: the rival at the same cost. The authors' batch with their rate times 1/4, 1/2, 1, 2 and 4, each for a fifth of
  what the study cost (and no longer than the recipe), its schedule as long as itself. The rate that ends lowest is
  the rival's.
- then in turns, with three seeds: alone, `ours` (the settings of the export, for the training time of the recipe),
  `ours_short` (for the share of it that the answer says is enough), and `rival`, `rival_short` (the rival's rate, as
  long as these two). Schedules are as long as their runs.

The loss to come to is the worst that the authors' own runs end at, or keep, where the program keeps its best. What
counts is the training time at which a run is there first, theirs, too; ours is that of the short run, or of the long
one where the short one does not come to it. `time_ratio` is theirs / ours, the geometric mean over the seeds, `low`
to `high` its 90 % interval (Student's t of the logarithms). A seed that does not come to it at all has the whole run
as its time, which flatters us: `came_to_it` says how many did. Where the answer keeps the authors' settings the ratio
is 1 and nothing is run. `equal_time` is our loss less theirs at the end of equal training time.

One core, one thread and one process at a time. Of frontier tools (Lightning's Tuner, accelerate's
find_executable_batch_size, transformers' auto_find_batch_size) none is beside `speed`: they look for the batch that
runs out of memory, which does not happen on a CPU without a limit.

FILE has a line for each step that was taken: the same command goes on where it stopped, on another day, too. Those of the figures
in docs/benchmarks.md are in results/real_workloads.jsonl. It ends without a try where
the program, init, run or export fails: the message is the row's reason. --quick takes one seed, two rates, a tenth of
each length and a study of two runs: to see that it goes through, not to quote it. On two quiet cores all takes some
seven hours, an hour for each. Peers' packages of `packages` in the list come with pip install --no-deps.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import math
import os
import shlex
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from strangers import Said, said
from workloads_of.listed import REPOSITORIES_OF_DATA, WORKLOADS, Setting, Workload

from batchscout.orchestrator.stages.findings import found
from batchscout.orchestrator.stages.frontier.findings import FrontierFindings
from batchscout.orchestrator.study.journal import replay
from batchscout.orchestrator.study.run_directory import load_stored_study
from batchscout.trainers.sources.watch.flags import with_values

WATCHED = Path(__file__).with_name("workloads_of") / "watched.py"
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
T_95 = {2: 6.31, 3: 2.92, 4: 2.35, 5: 2.13}
"""Student's t at 0.95 for so many seeds."""
EVALUATIONS = 25


@dataclass(frozen=True)
class Settings:
    """What a run is told; None is the program's own."""

    batch: int | None = None
    """Samples of an optimizer step."""
    micro_batch: int | None = None
    """What is typed as the batch: the same, where the program does not accumulate."""
    learning_rate: float | None = None
    compile: bool = False
    command: tuple[str, ...] = ()
    """As exported; empty: its own."""


@dataclass
class Outcome:
    """What a step came to; a line of the file."""

    workload: str
    step: str
    said: Said
    run: dict[str, Any] = field(default_factory=dict)
    """Of a training run: `steps`, `batch`, `seconds` (wall, CPU) and the `curve`."""
    study: dict[str, Any] = field(default_factory=dict)

    @property
    def is_well(self) -> bool:
        return self.said.is_well and bool(self.run or self.study)

    @property
    def seconds(self) -> float:
        return self.run["seconds"][0]

    def end(self, workload: Workload) -> float:
        """Return the loss that it ends with; infinite where it diverged."""
        losses = [loss if math.isfinite(loss) else math.inf for *_, loss in self.run["curve"]] or [math.inf]
        return min(losses) if workload.keeps_best else losses[-1]

    def reached(self, loss: float) -> float | None:
        """Return the training seconds at which the curve is first at a loss, between two evaluations along the line; None if it never is."""
        before: tuple[float, float] | None = None
        for _, seconds, _, at in self.run["curve"]:
            if at <= loss:
                if before is None:
                    return seconds
                return before[0] + (seconds - before[0]) * (before[1] - loss) / (before[1] - at)
            before = (seconds, at) if math.isfinite(at) else None
        return None


def main() -> None:
    chosen = arguments()
    taken = outcomes_of(chosen.out)
    for workload in WORKLOADS:
        if chosen.only and workload.name not in chosen.only:
            continue
        known = {one.step: one for one in taken if one.workload == workload.name}
        for step, settings, share in steps_of(workload, known, chosen):
            if step not in known:
                known[step] = take(workload, step, settings, share, known, chosen)
                with chosen.out.open("a") as file:
                    file.write(json.dumps(asdict(known[step])) + "\n")
                print(told(workload, known[step]), flush=True)
        taken += [one for one in known.values() if one not in taken]
    rows = {
        one.name: judged(one, {step.step: step for step in taken if step.workload == one.name}) for one in WORKLOADS
    }
    rows = {name: row for name, row in rows.items() if row}
    print(table(rows))
    print(json.dumps(rows | {"summary": summary(rows)}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", action="append", default=[], metavar="NAME=FOLDER", help="where a repository lies")
    parser.add_argument("--only", nargs="+", default=[], choices=[one.name for one in WORKLOADS], metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3, choices=(1, 2, 3, 4, 5), help="an interval takes at least 2")
    parser.add_argument("--work", type=Path, default=Path("real_workloads"), help="a folder for each workload, kept")
    parser.add_argument("--out", type=Path, help="a line for each step; default: outcomes.jsonl in --work")
    parser.add_argument("--limit-seconds", type=float, default=1_800, help="of any one step; default 1800")
    parser.add_argument("--quick", action="store_true", help="to see that it goes through, not to quote it")
    chosen = parser.parse_args()
    chosen.work = chosen.work.resolve()
    chosen.work.mkdir(parents=True, exist_ok=True)
    chosen.out = chosen.out or chosen.work / "outcomes.jsonl"
    chosen.at = {name: Path(folder).resolve() for name, folder in (one.split("=", 1) for one in chosen.at)}
    if chosen.quick:
        chosen.seeds = 1
    return chosen


def outcomes_of(file: Path) -> list[Outcome]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [Outcome(one["workload"], one["step"], Said(**one["said"]), one["run"], one["study"]) for one in lines]


def steps_of(
    workload: Workload, known: Mapping[str, Outcome], chosen: argparse.Namespace
) -> Iterator[tuple[str, Settings, float]]:
    """Yield (step, settings, share of the recipe's length in training time), as long as what was taken allows the next."""
    yield "alone-0", Settings(), 1.0
    if not known["alone-0"].is_well:
        return
    yield "study", Settings(), 1.0
    if not known["study"].is_well:
        return
    study, whole = known["study"].study, known["alone-0"].seconds
    factors = FACTORS[1:3] if chosen.quick else FACTORS
    own = workload.recipe.learning_rate
    for factor in factors:
        yield f"rate-{factor:g}", Settings(learning_rate=own * factor), min(1.0, study["cost"] / len(factors) / whole)
    rival = own * best_factor(workload, known)
    ours, short = answer_of(workload, study), study["share"]
    for seed in range(chosen.seeds):
        yield f"alone-{seed}", Settings(), 1.0
        if ours is not None:
            yield f"ours-{seed}", ours, 1.0
            if short < 1:
                yield f"ours_short-{seed}", ours, short
        if rival != own:
            yield f"rival-{seed}", Settings(learning_rate=rival), 1.0
            if short < 1:
                yield f"rival_short-{seed}", Settings(learning_rate=rival), short


def best_factor(workload: Workload, known: Mapping[str, Outcome]) -> float:
    rates = {step: one.end(workload) for step, one in known.items() if step.startswith("rate-") and one.is_well}
    return float(min(rates, key=rates.__getitem__).split("-")[1]) if rates else 1.0


def answer_of(workload: Workload, study: Mapping[str, Any]) -> Settings | None:
    """Return what the answer changes; None where it keeps the authors' settings."""
    batch, rate, compiled = study["batch"], study["learning_rate"], study["compile"]
    own = workload.recipe
    if batch == own.batch and abs(rate / own.learning_rate - 1) < 1e-3 and not compiled:
        return None
    micro_batch = study["micro_batch"] if "gradient_accumulation_steps" in study["flags"] else batch
    return Settings(batch, micro_batch, rate, compiled, tuple(study["command"]))


def take(
    workload: Workload,
    step: str,
    settings: Settings,
    share: float,
    known: Mapping[str, Outcome],
    chosen: argparse.Namespace,
) -> Outcome:
    place = chosen.work / workload.name
    place.mkdir(exist_ok=True)
    if step == "study":
        return studied(workload, place, chosen)
    arm, seed = step.rsplit("-", 1)
    length, steps = length_of(workload, settings, share, known, chosen.quick)
    values = {"learning_rate": settings.learning_rate, "length": length, "seed": int(seed) if arm != "rate" else 0}
    return trained(workload, step, settings, values, steps, place, chosen)


def length_of(
    workload: Workload, settings: Settings, share: float, known: Mapping[str, Outcome], quick: bool
) -> tuple[int | None, int]:
    """Return the length of a run, in the program's unit, and about how many optimizer steps that takes; the recipe's own is None.

    share: of the training time of the recipe. With another batch as many samples as this one's own speed makes of it, by the study's timing.
    """
    own, at_most = workload.recipe.batch, workload.steps_at_most
    if settings == Settings() and not quick:
        return None, at_most
    batch = settings.batch or own
    steps = known["alone-0"].run["steps"] if "alone-0" in known else at_most / 10
    samples = steps * own * share / (known["study"].study["by_speed"] if settings.batch else 1.0)
    if workload.unit == "steps":
        length = max(round(samples / batch), 1)
        return length, length
    length = max(round(samples / workload.samples), 1)
    return length, length * math.ceil(workload.samples / batch)


def trained(
    workload: Workload,
    step: str,
    settings: Settings,
    values: Mapping[str, float | None],
    steps: int,
    place: Path,
    chosen: argparse.Namespace,
) -> Outcome:
    """Run the program to its end, from a fresh copy of its code, and read its curve."""
    code = fresh_copy(workload, place / step, chosen)
    words, batch = list(settings.command or workload.command), settings.batch or workload.recipe.batch
    for setting, value in (
        (workload.seed, values["seed"]),
        (workload.length, values["length"]),
        (workload.learning_rate, values["learning_rate"]),
        (workload.batch, settings.micro_batch),
    ):
        if value is not None:
            words = with_setting(setting, f"{value:.6g}" if isinstance(value, float) else str(value), words, code)
    rest = steps - steps % (workload.samples // batch or 1)
    spec = {
        "workload": workload.name,
        "seed": int(values["seed"] or 0),
        "every": max(steps // EVALUATIONS, 1),
        "last": sorted({steps, rest, (steps // math.ceil(workload.samples / batch)) * (workload.samples // batch)}),
        "printed": workload.printed,
        "compile": settings.compile,
    }
    file = place / f"{step}.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, str(WATCHED), str(file), json.dumps(spec), *words]
    found = said(in_its_environment(workload, command, code), code, chosen.limit_seconds, place / f"{step}.txt")
    found = replace(found, message="") if found.is_well else found
    run = json.loads(file.read_text()) | {"batch": batch, "words": words} if file.exists() else {}
    shutil.rmtree(code, ignore_errors=True)
    return Outcome(workload.name, step, found, run if run.get("curve") else {})


def with_setting(setting: Setting, value: str, words: Sequence[str], code: Path) -> list[str]:
    for line in setting.lines:
        put_line(code / line.file, line.line, line.text.replace("{value}", value))
    return with_values(words, dict.fromkeys(setting.flags, value)) if setting.flags else list(words)


def put_line(file: Path, number: int, text: str) -> None:
    lines = file.read_text().splitlines(keepends=True)
    old = lines[number - 1]
    lines[number - 1] = old[: len(old) - len(old.lstrip())] + text + "\n"
    file.write_text("".join(lines))


def fresh_copy(workload: Workload, into: Path, chosen: argparse.Namespace) -> Path:
    """Lay the program's code and its data, as the list has it; return the folder in which its command is typed."""
    shutil.rmtree(into, ignore_errors=True)
    host, what = workload.source.split(":", 1)
    name, _, version = what.partition("==" if host == "installed" else "@")
    needed = [REPOSITORIES_OF_DATA[workload.name]] if workload.name in REPOSITORIES_OF_DATA else []
    for repository, commit in [*needed, *([(name, version)] if host == "github" else [])]:
        if repository not in chosen.at:
            raise SystemExit(f"{workload.name} needs {repository}, commit {commit}: give --at {repository}=FOLDER")
    if host == "github":
        shutil.copytree(chosen.at[name], into, ignore=shutil.ignore_patterns(".git"))
    elif importlib.metadata.version(name) != version:
        raise SystemExit(
            f"{workload.name} is of {name} {version}, and {importlib.metadata.version(name)} is installed: pip install {what}"
        )
    else:
        into.mkdir()
    for file, checksum in workload.sha256:
        found = hashlib.sha256((into / file).read_bytes()).hexdigest()[: len(checksum)]
        if found != checksum:
            raise SystemExit(
                f"{chosen.at[name]} has another {file} ({found}) than the list ({checksum}): take {workload.source}"
            )
    workload.data(into, chosen.at)
    for change in workload.changes:
        put_line(into / change.file, change.line, change.text)
    return into


def in_its_environment(workload: Workload, command: Sequence[str], code: Path) -> list[str]:
    """Return the command with the variables of the list; what is imported from the code's folder comes before what is already on the path."""
    values = {name: value.format(code=code) for name, value in workload.environment}
    if "PYTHONPATH" in values:
        values["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    return ["env", *(f"{name}={value}" for name, value in values.items()), *command]


def studied(workload: Workload, place: Path, chosen: argparse.Namespace) -> Outcome:
    """Type the user's three commands; what fails first is the outcome."""
    code = fresh_copy(workload, place / "study", chosen)
    own = {
        "stages": "[{'type':'train','max_runs':2}]",
        "sample_budget": str(16 * workload.recipe.batch),
        "batch": f"{{'micro_batch_size':{workload.recipe.batch},'gradient_accumulation_steps':1}}",
        "compile": "false",
    }
    quick = [word for key, value in own.items() for word in ("--set", f"{key}={value}")] if chosen.quick else []
    seconds = 0.0
    for words in (
        ["init", *workload.command],
        ["run", "study.yaml", "--dir", "run", *quick],
        ["export", "run", "--to", "script"],
    ):
        found = said(
            in_its_environment(workload, [sys.executable, "-m", "batchscout", *words], code),
            code,
            chosen.limit_seconds * 2,
            place / f"{words[0]}.txt",
            whole=words[0] == "export",
        )
        seconds += found.seconds
        if not found.is_well:
            return Outcome(workload.name, "study", found)
    whole = Said(found.code, round(seconds, 1), found.message)
    return Outcome(workload.name, "study", whole, study=read_study(code / "run", found.message, workload.recipe.batch))


def read_study(run: Path, exported: str, own_batch: int) -> dict[str, Any]:
    answer = json.loads((run / "recommendation.json").read_text())
    config = load_stored_study(run / "study.yaml")
    study = replay(run / "journal.jsonl", config.name)
    time = answer.get("time") or {}
    frontier = found(study, FrontierFindings)
    rates = frontier.rates if frontier else {}
    batch = answer["effective_batch_size"]
    by_frontier = rates[own_batch] / rates[batch] if own_batch in rates and batch in rates else 1.0
    return {
        "verdict": answer["verdict"],
        "decided": answer["decided"],
        "cost": study.lane_seconds,
        "batch": batch,
        "micro_batch": answer["micro_batch_size"],
        "learning_rate": answer["learning_rate"],
        "compile": answer["compile"],
        "checkpointing": answer["activation_checkpointing"],
        "share": min(time.get("share", 1.0), 1.0),
        "low": time.get("low"),
        "high": time.get("high"),
        "by_rate": time.get("by_rate"),
        "by_speed": time.get("by_speed") or by_frontier,
        "frontier": {str(size): rate for size, rate in rates.items()},
        "exported": exported,
        "command": shlex.split(exported.strip().splitlines()[-1])[1:],
        "flags": answer["script"]["flags"],
    }


def judged(workload: Workload, known: Mapping[str, Outcome]) -> dict[str, Any]:
    """Return a workload's figures, or the reason for which it has none; nothing where it was not begun."""
    if "alone-0" not in known:
        return {}
    failed = next((one for one in known.values() if one.step in ("alone-0", "study") and not one.is_well), None)
    if failed is not None:
        words = failed.said.message.strip().splitlines()
        return {
            "time_ratio": None,
            "low": None,
            "high": None,
            "study_cost": None,
            "why": words[-1][:300] if words else "",
        }
    if "study" not in known:
        return {}
    study = known["study"].study
    theirs = by_seed("alone", known)
    target = max(one.end(workload) for one in theirs.values())
    row: dict[str, Any] = {
        **(against(workload, "ours", known, target) or {"time_ratio": 1.0, "low": 1.0, "high": 1.0}),
        "study_cost": round(study["cost"], 1),
        "answer": f"{study['batch']} at {study['learning_rate']:.3g}{' compiled' if study['compile'] else ''}",
        "theirs": f"{workload.recipe.batch} at {workload.recipe.learning_rate:.3g}",
        "claimed": round(1 / study["share"], 2),
        "decided": study["decided"],
        "loss": round(target, 4),
        "seconds": round(statistics.fmean(one.seconds for one in theirs.values()), 1),
        "cpu_seconds": round(statistics.fmean(one.run["seconds"][1] for one in theirs.values()), 1),
    }
    saved = 1 - 1 / row["time_ratio"] if row["time_ratio"] else 0.0
    row["pays_from_seconds"] = round(study["cost"] / saved, 1) if saved > 0 else None
    row["rival"] = against(workload, "rival", known, target) or {"time_ratio": 1.0, "low": 1.0, "high": 1.0}
    row["rival"]["factor"] = best_factor(workload, known)
    row["speed"] = speeds(workload, known)
    return row


def by_seed(arm: str, known: Mapping[str, Outcome]) -> dict[str, Outcome]:
    return {step.rsplit("-", 1)[1]: one for step, one in known.items() if step.rsplit("-", 1)[0] == arm and one.run}


def against(workload: Workload, arm: str, known: Mapping[str, Outcome], target: float) -> dict[str, Any] | None:
    """Return how much sooner an arm comes to a loss than the authors' own settings; None if it has no runs."""
    theirs, whole, short = by_seed("alone", known), by_seed(arm, known), by_seed(f"{arm}_short", known)
    logs, cpu, came, apart = list[float](), list[float](), 0, list[float]()
    for seed, one in whole.items():
        if seed not in theirs:
            continue
        times = [run.reached(target) for run in (short.get(seed), one) if run is not None]
        first = next((time for time in times if time is not None), None)
        came += first is not None
        before = theirs[seed].reached(target)
        assert before is not None, "the loss is one that all of these come to"
        logs.append(math.log(before / (first or one.seconds)))
        cpu.append(one.run["seconds"][1] / one.seconds)
        apart.append(one.end(workload) - theirs[seed].end(workload))
    if not logs:
        return None
    mean, half = statistics.fmean(logs), half_width(logs)
    return {
        "time_ratio": round(math.exp(mean), 3),
        "low": None if half is None else round(math.exp(mean - half), 3),
        "high": None if half is None else round(math.exp(mean + half), 3),
        "came_to_it": f"{came} of {len(logs)}",
        "equal_time": round(statistics.fmean(apart), 4),
        "equal_time_within": None if (wide := half_width(apart)) is None else round(wide, 4),
        "cpu_of_wall": round(statistics.fmean(cpu), 2),
    }


def half_width(values: Sequence[float]) -> float | None:
    """Return half of the 90 % interval of a mean; None of one value."""
    if len(values) < 2:
        return None
    return T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def speeds(workload: Workload, known: Mapping[str, Outcome]) -> dict[str, Any]:
    """Return samples/s in the program itself, and those of the fastest micro-batch that the frontier found over the recipe's own."""
    arms = {
        arm: [one.run["steps"] * one.run["batch"] / one.seconds for one in by_seed(arm, known).values()]
        for arm in ("alone", "ours")
    }
    found = {arm: round(statistics.median(rates), 1) for arm, rates in arms.items() if rates}
    frontier = {int(size): rate for size, rate in known["study"].study["frontier"].items()}
    own = _between(frontier, workload.recipe.batch)
    fastest = max(frontier, key=frontier.__getitem__) if frontier else None
    return found | {
        "fastest_micro_batch": fastest,
        "frontier_ratio": round(frontier[fastest] / own, 3) if fastest and own else None,
    }


def _between(frontier: Mapping[int, float], size: int) -> float | None:
    """Return the samples/s of a size: between its neighbours along the line where it was not timed itself; None outside of them."""
    below, above = [one for one in frontier if one <= size], [one for one in frontier if one >= size]
    if not below or not above:
        return None
    low, high = max(below), min(above)
    share = (size - low) / (high - low) if high > low else 0.0
    return frontier[low] + share * (frontier[high] - frontier[low])


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    ratios = [row["time_ratio"] for row in rows.values() if row["time_ratio"] is not None]
    rivals = [row["time_ratio"] / row["rival"]["time_ratio"] for row in rows.values() if row["time_ratio"] is not None]
    return {
        "workloads": len(rows),
        "answered": len(ratios),
        "median_ratio": round(statistics.median(ratios), 3) if ratios else None,
        "below_1_beyond_noise": sum((row.get("high") or 1.0) < 1.0 for row in rows.values()),
        "median_over_rival": round(statistics.median(rivals), 3) if rivals else None,
    }


def told(workload: Workload, one: Outcome) -> str:
    if one.run:
        what = f"loss {one.end(workload):.4f} after {one.seconds:.1f} s of training, {one.run['steps']} steps"
    else:
        what = one.study.get("verdict", "") or one.said.message.strip()[-300:]
    return f"{one.workload:20} {one.step:14} {one.said.seconds:7.1f} s  {what}"


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        [
            "workload",
            "theirs",
            "the answer",
            "claimed",
            "their time / ours",
            "came to it",
            "five rates instead",
            "study",
            "why not",
        ]
    ]
    lines += [["---"] * len(lines[0])]
    for name, row in rows.items():
        if "why" in row:
            lines.append([name, *["-"] * 7, row["why"]])
            continue
        rival = row["rival"]
        lines.append([
            name, row["theirs"], row["answer"], f"{row['claimed']}x", in_words(row), row.get("came_to_it", "keeps theirs"),
            f"{in_words(rival)} (x{rival['factor']:g})", f"{row['study_cost']:.0f} s", "",
        ])  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def in_words(row: Mapping[str, Any]) -> str:
    return f"{row['time_ratio']:.2f}x" + (f" ({row['low']:.2f} to {row['high']:.2f})" if row["low"] is not None else "")


if __name__ == "__main__":
    main()
