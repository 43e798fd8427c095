"""Reads what earlier formats wrote, so that an older run directory can be looked at. No run goes on in one. Nothing else may know them.

Format 1 left out what was not set, had a memory knob that is gone, and took a batch of 1 for none. Formats 1 and 2 kept the digests of code
among those of other files, by the files' bytes, and named modules of this program as they were when `trainers` was a package of its own.
Format 3 is written alike, but its validation losses are those of a set's first samples, to which those of format 4 cannot be compared.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import JsonValue

Record = dict[str, Any]
"""The JSON of a line: only its `kind` and `version` tell which keys it has."""

_REMOVED_KNOB = "optimizer_in_backward"


def upgraded_line(record: Record, version: int) -> Record | None:
    """Return the line of this format version that says what a line of an earlier one says; None if it tells of a trial of the removed
    knob, which no study could go on with."""
    if _REMOVED_KNOB in str(record.get("id")):  # a trial's id names its knobs
        return None
    return _renamed(record | {"version": version} | _findings_as_now(record))


def _renamed(value: Any) -> Any:
    """Return the value with the names of modules as they are now."""
    if isinstance(value, dict):
        return {key: _renamed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_renamed(one) for one in value]
    is_import_path = isinstance(value, str) and re.fullmatch(r"trainers\.[\w.]+:\w+", value)
    return f"batchscout.{value}" if is_import_path else value


def _findings_as_now(record: Record) -> Record:
    """Return a stage's findings without the knob that is gone; none of a real run that did not say how its batch is split."""
    findings = record.get("findings")
    if record["kind"] != "concluded" or not isinstance(findings, dict):
        return {}
    if "knobs" in findings:
        findings = findings | {"knobs": [one for one in findings["knobs"] if _REMOVED_KNOB not in one["memory_knobs"]]}
    if record["stage"] == "horizons" and findings.get("sample_budget") is None:
        findings = None
    return {"findings": findings}


def upgraded_study(tree: JsonValue) -> JsonValue:
    """Return the keys of a stored study.yaml as this version has them."""
    if not isinstance(tree, dict):
        return tree
    if tree.get("batch") == {"micro_batch_size": 1, "gradient_accumulation_steps": None, "effective_batch_size": None}:
        tree["batch"] = {}
    if isinstance(stages := tree.get("stages"), list):
        for stage in stages:
            if isinstance(stage, dict) and isinstance(names := stage.get("memory_knobs"), list):
                stage["memory_knobs"] = [name for name in names if name != _REMOVED_KNOB]
    return _renamed(tree)
