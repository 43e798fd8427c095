"""A new user's first hour: commands, lines and time from an empty environment to an answer in the trainer, beside three tools.

    python benchmarks/first_hour.py [--only TOOL] [--quick]

Each tool has a virtual environment of its own, in which only torch and what torch needs is there before: linked in from the
environment that runs this, since that is the same for all and most of what there is to download. pip takes everything else from
the registry, without its cache. Then a user who has a model (net.py), data (sets.py) and nothing else does what the tool's own pages
say, with the files in first_hour_of/: the tool's first example; the same with the own model; with the own data; once more after the
process was killed half-way (SIGKILL); a report; and what was found in a trainer. The peers are Lightning's Tuner, Accelerate's
find_executable_batch_size and Ray Tune with ASHA, each as a program of their users.

`lines` are those that are not in the step before, without blank ones and comments; `commands` those that are typed; and `seconds` the
clock's: a machine that does other work makes them worthless. A step that a tool has nothing for is null. The steps say nothing of what an
answer is worth: the table names what each tool answers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FILES = Path(__file__).with_name("first_hour_of")
STEPS = ("install", "first_result", "own_model", "own_data", "resume", "report", "export")
MOST_SECONDS = 1_800.0


@dataclass(frozen=True)
class Step:
    """What a user types and writes."""

    commands: tuple[str, ...]
    """In the tool's own environment and folder."""
    writes: str = ""
    """A file of first_hour_of/TOOL; empty if nothing is written."""
    changes: str = ""
    """The file that it is a changed copy of; empty if it is new."""
    killed: str = ""
    """What is killed half-way before the step begins; empty if nothing is."""


@dataclass(frozen=True)
class Tool:
    answers: str
    """What its user knows in the end."""
    steps: dict[str, Step]
    is_half_way: Callable[[Path], bool] = lambda folder: False
    """True if what is to be killed has done some of its work."""


@dataclass(frozen=True)
class Taken:
    """What a step took."""

    seconds: float
    commands: int
    lines: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("batchscout", "lightning", "accelerate", "ray_tune"))
    parser.add_argument(
        "--quick", action="store_true", help="a smaller first study: to see that it runs, not to quote it"
    )
    chosen = parser.parse_args()
    tools = tools_of(quick=chosen.quick)
    names = [chosen.only] if chosen.only else list(tools)
    taken = {name: taken_by(name, tools[name]) for name in names}
    print_table(taken, tools)
    print(json.dumps({tool: {step: one and vars(one) for step, one in steps.items()} for tool, steps in taken.items()}))


def taken_by(name: str, tool: Tool) -> dict[str, Taken | None]:
    with tempfile.TemporaryDirectory(prefix=f"first-hour-{name}-") as folder:
        return all_steps(name, tool, Path(folder))


def tools_of(*, quick: bool) -> dict[str, Tool]:
    """Return the tools, in the order in which they have their turn."""
    small = " --set sample_budget=128 --set stages=[{'type':'train','max_runs':2}]" if quick else ""
    own_model, own_data = (f"batchscout run {name}.yaml{small}" for name in ("own_model", "own_data"))
    return {
        "batchscout": Tool(
            "micro-batch, accumulation, activation checkpointing and learning rate, with the probability of being right",
            {
                "install": Step((f"pip install {ROOT}",)),
                "first_result": Step((f"batchscout run {ROOT}/configs/quickstart.yaml{small}",)),
                "own_model": Step((own_model,), "own_model.yaml"),
                "own_data": Step((own_data,), "own_data.yaml", "own_model.yaml"),
                "resume": Step((f"{own_data} --dir killed",), killed=f"{own_data} --dir killed"),
                "report": Step(("batchscout report runs/own-data",)),
                "export": Step(("batchscout export runs/own-data --to hf",)),
            },
            is_half_way=lambda folder: _ended_trials(folder / "killed" / "journal.jsonl") >= 2,
        ),
        "lightning": Tool(
            "the largest batch that fits, and a learning rate by a sweep over it; no accumulation, no comparison of batches",
            {
                "install": Step(("pip install lightning",)),
                **_programs("first", "own_model", "own_data"),
                "report": Step(("pip install matplotlib", "python report.py"), "report.py", "own_data.py"),
                "export": Step(("python export.py",), "export.py", "own_data.py"),
            },
        ),
        "accelerate": Tool(
            "a batch that fits; no learning rate, no accumulation, no comparison of batches",
            {
                "install": Step(("pip install accelerate",)),
                **_programs("first", "own_model", "own_data"),
                "export": Step(()),  # what finds the batch is what trains
            },
        ),
        "ray_tune": Tool(
            "the best of ten runs at equal passes over the data; no memory, no accumulation, no uncertainty",
            {
                "install": Step(("pip install ray[tune]",)),
                **_programs("first", "own_model", "own_data"),
                "resume": Step(("python resume.py",), "resume.py", "own_data.py", killed="python own_data.py"),
                "report": Step(("python report.py",), "report.py", "resume.py"),
                "export": Step(()),  # the program has the best run's values
            },
            is_half_way=lambda folder: any((folder / "results" / "own-data").glob("train_*/result.json")),
        ),
    }  # fmt: skip


def _programs(first: str, own_model: str, own_data: str) -> dict[str, Step]:
    """Return the steps of a tool whose every answer is a program's output."""
    return {
        "first_result": Step((f"python {first}.py",), f"{first}.py"),
        "own_model": Step((f"python {own_model}.py",), f"{own_model}.py", f"{first}.py"),
        "own_data": Step((f"python {own_data}.py",), f"{own_data}.py", f"{own_model}.py"),
    }


def _ended_trials(journal: Path) -> int:
    return journal.read_text().count('"kind":"ended"') if journal.exists() else 0


def all_steps(name: str, tool: Tool, folder: Path) -> dict[str, Taken | None]:
    """Take every step, each in what the ones before have left."""
    environment = new_environment(folder)
    work = folder / "work"
    shutil.copytree(FILES / "user", work)
    write_samples(work / "samples.pt")
    taken: dict[str, Taken | None] = {}
    for step in STEPS:
        wanted = tool.steps.get(step)
        taken[step] = None if wanted is None else one_step(name, tool, wanted, work, environment)
        print(f"{name}, {step}: {as_text(taken[step])}", flush=True)
    return taken


def one_step(name: str, tool: Tool, step: Step, work: Path, environment: dict[str, str]) -> Taken:
    if step.killed:
        kill_half_way(step.killed, work, environment, lambda: tool.is_half_way(work))
    if step.writes:
        shutil.copy(FILES / name / step.writes, work)
    began = time.perf_counter()
    for command in step.commands:
        typed(command, work, environment)
    return Taken(round(time.perf_counter() - began, 1), len(step.commands), new_lines(name, step))


def new_environment(folder: Path) -> dict[str, str]:
    """Make a virtual environment with torch and nothing else, and return the variables that a shell in it has."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    for path in sorted(of_torch("torch")):
        target = packages / path.name
        if not target.exists():
            target.symlink_to(path)
    plain = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return plain | {
        "PATH": f"{folder / 'venv' / 'bin'}:{os.environ['PATH']}",
        "BATCHSCOUT_CACHE": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "PIP_NO_CACHE_DIR": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def of_torch(name: str, seen: set[str] | None = None) -> Iterator[Path]:
    """Yield what a package, and all that it needs, have in this environment."""
    seen = set() if seen is None else seen
    seen.add(name)
    found = importlib.metadata.distribution(name)
    tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
    yield from (Path(str(found.locate_file(top))) for top in tops)
    for text in found.requires or ():
        needed = Requirement(text)
        if needed.name.lower() not in seen and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
            yield from of_torch(needed.name.lower(), seen)


def write_samples(path: Path) -> None:
    """Write data that can be learnt: the class is the largest of ten mixtures of the inputs."""
    import torch

    random = torch.Generator().manual_seed(1)
    x, mixtures = torch.randn(16_896, 64, generator=random), torch.randn(64, 10, generator=random)
    torch.save((x, (x @ mixtures).argmax(dim=1)), path)


def typed(command: str, work: Path, environment: dict[str, str]) -> None:
    """Run what a user types; what it says is shown only where it fails."""
    done = subprocess.run(
        split(command), cwd=work, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
    )
    if done.returncode:
        raise SystemExit(f"`{command}` ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def split(command: str) -> list[str]:
    """Return the words of a command, none of which has a space in it; `pip` is that of the environment's Python."""
    words = command.split()
    return ["python", "-m", *words, "--quiet"] if words[0] == "pip" else words


def kill_half_way(command: str, work: Path, environment: dict[str, str], is_half_way: Callable[[], bool]) -> None:
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            split(command), cwd=work, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        deadline = time.monotonic() + MOST_SECONDS
        while not is_half_way():
            if process.poll() is not None or time.monotonic() > deadline:
                said.seek(0)
                raise SystemExit(f"`{command}` was not half-way when it was to be killed: {said.read()[-3000:]!r}")
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def new_lines(name: str, step: Step) -> int:
    """Return how many lines a step's file has that the one it is a copy of has not."""
    if not step.writes:
        return 0
    before = lines_of(FILES / name / step.changes) if step.changes else Counter[str]()
    return (lines_of(FILES / name / step.writes) - before).total()


def lines_of(file: Path) -> Counter[str]:
    lines = (line.split("#")[0].rstrip() for line in file.read_text().splitlines())
    return Counter(line for line in lines if line)


def as_text(taken: Taken | None) -> str:
    if taken is None:
        return "-"
    return f"{taken.seconds:.0f} s, {taken.commands} cmd, {taken.lines} lines"


def print_table(taken: dict[str, dict[str, Taken | None]], tools: dict[str, Tool]) -> None:
    print(f"{'':14}" + "".join(f"{tool:>28}" for tool in taken))
    for step in STEPS:
        print(f"{step:14}" + "".join(f"{as_text(steps[step]):>28}" for steps in taken.values()))
    for tool in taken:
        print(f"{tool} answers: {tools[tool].answers}")


if __name__ == "__main__":
    main()
