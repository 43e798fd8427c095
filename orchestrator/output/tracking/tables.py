"""What trackers are told at the end of a study: its verdict, its tables and its report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchscout.orchestrator.output.tracking.runs import Found, Table
from batchscout.orchestrator.output.trial_rows import trial_row
from batchscout.orchestrator.study.state import Study
from batchscout.trainers.files import own_file


def found_by(study: Study, run_dir: Path, verdict: str) -> Found:
    """Return what a study has found, once its results are written."""
    path = run_dir / "recommendation.json"
    with own_file(path, "read"):
        tree: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    numbers = {key: value for key, value in tree.items() if not isinstance(value, (dict, list))}
    report = run_dir / "report.html"
    return Found({**numbers, "verdict": verdict}, _tables(study, tree), report if report.exists() else None)


def _tables(study: Study, recommendation: Mapping[str, Any]) -> dict[str, Table]:
    all_rows = {
        "trials": [trial_row(trial) for trial in study.trials.values()],
        "stages": [{"stage": name, "found": conclusion.reason} for name, conclusion in study.conclusions.items()],
        "alternatives": recommendation.get("alternatives", []),
        "ruled_out": recommendation.get("ruled_out", []),
    }
    return {name: table_of(rows) for name, rows in all_rows.items() if rows}


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return rows as a table of all columns that any of them has, in the order in which they come up."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    values = [[row.get(name) for name in columns] for row in rows]
    return Table(
        columns, [[json.dumps(one) if isinstance(one, (dict, list)) else one for one in row] for row in values]
    )
