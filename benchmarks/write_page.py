"""Write docs/benchmarks.md from what `record.py` kept of every benchmark's last run.

    python benchmarks/write_page.py RESULTS_DIR [PAGE]

RESULTS_DIR is benchmarks/results; PAGE is docs/benchmarks.md where none is given. A test says that the two agree.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from record import ROOT, Result, load

INTRODUCTION = """\
# Measurements

`benchmarks/write_page.py` writes this page from [benchmarks/results](../benchmarks/results), a file for the last run of
each benchmark, so edit neither by hand. To measure one again, on your machine too, and to see it here:

```sh
pip install -e '.[benchmarks]'                                # the peers that some of them compare with
python benchmarks/record.py gradient_error                    # run it, and keep its figures
python benchmarks/write_page.py benchmarks/results            # write this page
```

Timings want a quiet machine; `--device cuda` measures on a GPU;
`python benchmarks/NAME.py --help` says how each one measures.\
"""
NO_GPU = "**Nothing was run on a GPU yet.** The CUDA path is complete, and every figure here is a CPU's."
ON_A_GPU = "**On a GPU** ran {names}; every other figure here is a CPU's."
TRANSCRIBED = (
    "*Copied by hand* in the table: the figures are those that were written down by that date. "
    "Their last lines and commits were not kept; the next recorded run replaces them."
)
# A figure's unit is a word of its name; the first that fits decides.
UNITS: dict[str, Callable[[float], str]] = {
    "bytes": lambda value: f"{value / 2**20:,.2f} MiB",
    "per_second": lambda value: f"{value:,.0f} /s",
    "milliseconds": lambda value: f"{value:,.3g} ms",
    "seconds": lambda value: f"{value:.3g} s",
    "ratio": lambda value: f"{value:.2f}x",
    "error": lambda value: f"{value:.1%}",
    "overhead": lambda value: f"{value:.1%}",
    "data_wait": lambda value: f"{value:.1%}",
    "unused": lambda value: f"{value:.1%}",
}

TOLD_BY_WHAT_IT_PRINTED = ("worlds",)
"""Figures of every kind of world: a row of the table for people each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", metavar="RESULTS_DIR", type=Path)
    parser.add_argument("page", metavar="PAGE", type=Path, nargs="?", default=ROOT / "docs" / "benchmarks.md")
    chosen = parser.parse_args()
    results = {path.stem: load(path) for path in sorted(chosen.results.glob("*.json"))}
    if not results:
        raise SystemExit(f"{chosen.results} holds no result; record one: python benchmarks/record.py NAME")
    chosen.page.write_text(page_of(results))


def page_of(results: dict[str, Result]) -> str:
    parts = [INTRODUCTION]
    on_a_gpu = [f"[{name}](#{name})" for name, result in results.items() if result.gpu]
    parts.append(ON_A_GPU.format(names=", ".join(on_a_gpu)) if on_a_gpu else NO_GPU)
    parts.append(overview(results))
    if any(result.transcribed for result in results.values()):
        parts.append(TRANSCRIBED)
    return "\n\n".join([*parts, *(section(name, result) for name, result in results.items())]) + "\n"


def overview(results: dict[str, Result]) -> str:
    rows = [(f"[{name}](#{name})", result.title, result.date, state(result)) for name, result in results.items()]
    return table(("benchmark", "what it measures", "date", "figures"), rows)


def state(result: Result) -> str:
    if not result.rows and not result.last_line:
        return "not measured yet"
    return "copied by hand" if result.transcribed else "recorded"


def section(name: str, result: Result) -> str:
    parts = [f"## {name}", result.title, f"```sh\n{result.command}\n```"]
    if not result.rows and not result.last_line:
        return "\n\n".join([*parts, result.note])
    parts.append(figures(result))
    parts += [result.note] if result.note else []
    parts.append(conditions(result))
    if result.printed:
        parts.append(
            "\n".join(["<details><summary>What it printed</summary>\n", "```", *result.printed, "```", "</details>"])
        )
    return "\n\n".join(parts)


def figures(result: Result) -> str:
    if any(row.spread for row in result.rows):
        return table(("figure", "result", "spread"), [(row.what, row.result, row.spread) for row in result.rows])
    rows = [(row.what, row.result) for row in result.rows]
    rows += [(", ".join(words), as_text(words, value)) for words, value in flattened(result.last_line)]
    return table(("figure", "result"), rows)


def flattened(values: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (the names that lead to it, the figure) for every figure of a last line."""
    for name, value in values.items():
        if name in TOLD_BY_WHAT_IT_PRINTED:
            continue
        if isinstance(value, dict):
            yield from flattened(value, (*above, name))
        else:
            yield (*above, name), value


def as_text(words: Sequence[str], value: float | str | None) -> str:
    """Return the figure in the unit that its name holds; `-` where the benchmark has none."""
    if value is None or isinstance(value, str):
        return value or "-"
    name = f"_{'_'.join(words)}_"
    unit = next((write for word, write in UNITS.items() if f"_{word}_" in name), None)
    return unit(value) if unit else f"{value:,.0f}" if value == int(value) else f"{value:,.3g}"


def conditions(result: Result) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    facts = [result.date, *([result.gpu] if result.gpu else []), result.machine, versions]
    facts += [f"commit {result.commit}"] if result.commit else []
    facts += [f"took {result.wall_seconds:,.0f} s"] if result.wall_seconds is not None else []
    return "; ".join(facts) + "."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    main()
