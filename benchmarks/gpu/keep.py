"""Keep what runs of all.py found on one card as a result of docs/benchmarks.md.

    python benchmarks/gpu/keep.py LINES [LINES ...] --commit COMMIT --machine TEXT [--note TEXT]

LINES are the files that all.py wrote, in the order of the runs; a later line of a name replaces an earlier one, unless it was left out.
What benchmarks/results/gpu.json holds of the same card and versions stays where nothing new replaces it; write_page.py makes the page.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from record import RESULTS, Result, Row, load, save

MIB = 2**20
PARTS = ("turn", "compiled", "trial", "probe", "end", "versions")
"""Lines that belong to another one, or to the page's conditions."""
NOT_YET = "not yet run"
MOST_CHARACTERS = 120
"""Of one text in a cell; FILE has it whole."""
NOT_SHOWN = {"line", "ok", "seconds", "said", "expected", "trials", "processes_left", "failed", "micro_batch_size"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", metavar="LINES", type=Path, nargs="+")
    parser.add_argument("--commit", required=True, help="the code that ran")
    parser.add_argument("--machine", required=True, help="its processors and memory")
    parser.add_argument("--note", default="", help="what the figures alone do not say")
    chosen = parser.parse_args()
    lines = [json.loads(line) for path in chosen.lines for line in path.read_text().splitlines()]
    path = RESULTS / "gpu.json"
    versions = next(line for line in lines if line["line"] == "versions")
    result = Result(
        title="What ran on a GPU: gradients, memory, steps and studies, line by line.",
        command="python benchmarks/gpu/all.py --limit-seconds 420 --out FILE",
        date=versions["date"],
        machine=chosen.machine,
        versions={name: versions[name] for name in ("python", "torch", "ray")},
        gpu=f"1 x {versions['device']}, {versions['total_gib']:.1f} GiB, driver {versions['driver']}",
        note=chosen.note,
        commit=chosen.commit,
        rows=list(rows(lines)),
    )
    save(with_what_stays(load(path), result) if path.exists() else result, path)


def with_what_stays(earlier: Result, later: Result) -> Result:
    """Return the later result with those rows of the earlier one that are of the same card and versions, and not in it."""
    if (before := (earlier.gpu, earlier.versions)) != (now := (later.gpu, later.versions)):
        raise SystemExit(f"gpu.json is of {before}, and these lines are of {now}: move it away to begin anew")
    found = {row.what: row for row in earlier.rows} | {row.what: row for row in later.rows}
    still_open = {*open_in(earlier), *open_in(later)} - found.keys()
    known = [row for name, row in found.items() if name != NOT_YET]
    commits = dict.fromkeys(filter(None, (*earlier.commit.split(", "), later.commit)))
    return replace(later, commit=", ".join(commits), rows=[*known, *not_yet(still_open)])


def open_in(result: Result) -> list[str]:
    return [name for row in result.rows if row.what == NOT_YET for name in row.result.split("; ")]


def not_yet(names: Iterable[str]) -> Iterator[Row]:
    if names:
        yield Row(NOT_YET, "; ".join(sorted(names)))  # names have commas


def rows(lines: list[dict[str, Any]]) -> Iterator[Row]:
    found = {line["line"]: line for line in lines if line["line"] not in PARTS and "left_out" not in line}
    for name, line in found.items():
        told = "; ".join(f"{key}: {text(value)}" for key, value in line.items() if key not in NOT_SHOWN and value != "")
        verdict = "" if "ok" not in line else "as expected" if line["ok"] else "**not as expected**"
        yield Row(name, "; ".join(filter(None, (verdict, told))), spread(line, lines))
    yield from peaks(lines)
    yield from not_yet({line["line"] for line in lines if "left_out" in line} - found.keys())


def spread(line: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    """Return the lowest and highest tokens/s of each side's turns."""
    if "times_by_hand" not in line:
        return ""
    size, sides = line["micro_batch_size"], line["tokens_per_second"]
    rates = {
        side: [
            turn["tokens_per_second"]
            for turn in of(lines, "turn")
            if (turn["side"], turn["micro_batch_size"]) == (side, size)
        ]
        for side in sides
    }
    return "; ".join(f"{side} {min(values):,.0f} to {max(values):,.0f} /s" for side, values in rates.items() if values)


def peaks(lines: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield how far the peaks of the frontier's probes were from what was predicted."""
    probes = [probe for probe in of(lines, "probe") if probe["mebibytes"] and probe["predicted_mebibytes"]]
    if not probes:
        return
    for key, words in (("peak_allocated_bytes", "allocated by tensors"), ("peak_memory_bytes", "reserved")):
        ratios = [
            probe["mebibytes"][key] / probe["predicted_mebibytes"] for probe in probes if key in probe["mebibytes"]
        ]
        said = f"{min(ratios):.3f} to {max(ratios):.3f} times what was predicted from shapes ({len(ratios)} probes)"
        yield Row(f"peak of the frontier's probes, {words}", said)


def of(lines: Iterable[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["line"] == name]


def text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {text(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(text, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return textwrap.shorten(str(value), MOST_CHARACTERS, placeholder=" ...")


if __name__ == "__main__":
    main()
