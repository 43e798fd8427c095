"""Run a benchmark, and keep its figures with what one must know to repeat them.

    python benchmarks/record.py NAME [--note TEXT] [the benchmark's own arguments]

NAME is that of a file beside this one. Its output passes through; what it printed, its last line (one JSON object) and
the machine, versions, date, commit and seconds go to benchmarks/results/NAME.json. `write_page.py` makes
docs/benchmarks.md of them.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "ray", "transformers", "accelerate", "lightning")
TOOLS = (
    "ensemble",
    "made_worlds",
    "memory_models",
    "peer_searches",
    "record",
    "record_worlds",
    "recorded_worlds",
    "replayed",
    "side_by_side",
    "world_table",
    "world_tasks",
    "write_page",
)


@dataclass(frozen=True)
class Row:
    """One figure in words, of a run whose last line was not kept."""

    what: str
    result: str
    spread: str = ""


@dataclass(frozen=True)
class Result:
    """One run of a benchmark; the file benchmarks/results/NAME.json holds these fields."""

    title: str
    command: str
    date: str
    """YYYY-MM-DD (UTC), or what is known of it."""
    machine: str
    versions: dict[str, str]
    gpu: str = ""
    """Empty if the benchmark was not told to use one."""
    note: str = ""
    """What the figures alone do not say: how far they spread, and what they were measured under."""
    transcribed: bool = False
    """True if a person copied the figures from prose, as `rows`: then there is no last line."""
    rows: list[Row] = field(default_factory=list)
    commit: str = ""
    """The code that ran; `-dirty` if files differed from it."""
    wall_seconds: float | None = None
    last_line: dict[str, Any] = field(default_factory=dict)
    printed: list[str] = field(default_factory=list)
    """The lines before the last one: the table for people."""


def load(path: Path) -> Result:
    values = json.loads(path.read_text())
    return Result(**values | {"rows": [Row(**row) for row in values.get("rows", [])]})


def save(result: Result, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="a benchmark: the name of its file without .py")
    parser.add_argument("--note", default="", help="what the figures alone do not say")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks", help="where the benchmark's file lies")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where NAME.json goes")
    chosen, arguments = parser.parse_known_args()
    script = chosen.folder / f"{chosen.name}.py"
    if not script.is_file():
        raise SystemExit(f"there is no benchmark {script}; those in {chosen.folder}: {', '.join(names(chosen.folder))}")
    save(recorded(script, arguments, chosen.note), chosen.results / f"{chosen.name}.json")


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.py") if path.stem not in TOOLS)


def recorded(script: Path, arguments: list[str], note: str) -> Result:
    """Return what the benchmark found; exit as it does where it fails, so that nothing is kept of it."""
    commit, started = commit_of_code(), time.monotonic()
    lines = output_of(script, arguments)
    last_line = object_of(lines[-1] if lines else "", script)
    return Result(
        title=(ast.get_docstring(ast.parse(script.read_text())) or script.stem).splitlines()[0],
        command=shlex.join(["python", f"benchmarks/{script.name}", *arguments]),
        date=datetime.now(UTC).date().isoformat(),
        machine=machine(),
        versions=versions(),
        gpu=gpu() if "cuda" in arguments else "",
        note=note,
        commit=commit,
        wall_seconds=round(time.monotonic() - started, 1),
        last_line=last_line,
        printed=lines[:-1],
    )


def output_of(script: Path, arguments: list[str]) -> list[str]:
    """Return the lines that it printed, each passed on as it comes; its modules are those of this tree."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command, environment, lines = [sys.executable, str(script), *arguments], {**os.environ, "PYTHONPATH": path}, []
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    if process.returncode:
        raise SystemExit(process.returncode)
    return lines


def object_of(line: str, script: Path) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise SystemExit(f"the last line of {script.name} is not one JSON object: {line!r}; print its figures as one")
    return found


def commit_of_code() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> str:
    """Return the processor, how many of it, the memory and the platform."""
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in facts if line.startswith("model name")), platform.machine())
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{os.cpu_count()} CPUs ({model}), {memory_bytes / 2**30:.0f} GiB of memory, {platform.platform()}"


def gpu() -> str:
    import torch

    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


def versions() -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed here."""
    installed = {found.name.lower(): found.version for found in importlib.metadata.distributions()}
    return {"python": platform.python_version()} | {name: installed[name] for name in PACKAGES if name in installed}


if __name__ == "__main__":
    main()
