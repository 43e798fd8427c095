"""Says what the checks found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from pydantic import JsonValue

from batchscout.orchestrator.doctor.check import Check, worst
from batchscout.orchestrator.output.rows import labelled_lines
from batchscout.orchestrator.output.shown import Terminal, shown
from batchscout.orchestrator.units import counted

_STYLES = {"ok": "", "warning": "yellow", "fault": "red"}
_IN_ALL = {**_STYLES, "ok": "green"}


def as_json(checks: list[Check]) -> dict[str, JsonValue]:
    return {"verdict": worst(checks), "checks": [asdict(check) for check in checks]}


def print_checks(checks: list[Check]) -> None:
    """Print every check with its verdict, and below it what to do; last, what it comes to."""
    console = Terminal()
    names = max(len(check.name) for check in checks)
    for check in checks:
        remedy = [("", f"-> {check.remedy}")] if check.remedy else []
        rows = [(f"{check.verdict:7}  {check.name:{names}}", check.finding), *remedy]
        for line in labelled_lines(rows, console.width, indent=0):
            console.print(shown(line, style=_STYLES[check.verdict]), soft_wrap=True)
    console.print(shown(f"\n{in_all(checks)}", style=_IN_ALL[worst(checks)]))


def in_all(checks: Sequence[Check]) -> str:
    """Return what it comes to, in a sentence."""
    faults, warnings = (sum(check.verdict == verdict for check in checks) for verdict in ("fault", "warning"))
    if faults:
        return f"{counted(faults, 'fault')} to fix before a study runs here as asked."
    if warnings:
        return f"Studies run here, with {counted(warnings, 'warning')}."
    return "Studies run here."
