"""Reads the journals of version 0.1.0, whose records were untyped and stated facts in prose.

Everything here turns one such record into a record of format version 1. No other code may parse a reason or an id.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from orchestrator.study.causes import Cause

Record = dict[str, Any]
"""The JSON of a record had no type: only its `kind` tells which keys it has."""

_KINDS: dict[str, str] = {
    "run": "run_began", "ready": "cluster_ready", "facts": "facts_read", "stage": "stage_began", "trial": "proposed",
    "result": "evaluated", "conclusion": "concluded",
}  # fmt: skip
_HOST_RAN_OUT = "the host ran out of memory"
_REUSED = re.compile(r"(?:; |^)reused: measured on (\S+) in (.*)$")


def upgraded(record: Record) -> Record:
    """Return the record of format version 1 that says what this one of version 0 says."""
    kind = _KINDS.get(record["kind"]) or record["kind"]
    return {**_CHANGES.get(kind, dict)(record), "kind": kind, "version": 1}


def _facts(record: Record) -> Record:
    facts = dict(record["facts"])
    if "predicted_memory" in facts:
        facts["predicted_memory"] = {mode: _peak(lines) for mode, lines in facts["predicted_memory"].items()}
    return {**record, "facts": facts}


def _peak(lines: list[tuple[float, float]]) -> Record:
    return {"lines": [{"base_bytes": base, "bytes_per_sample": slope} for base, slope in lines]}


def _proposed(record: Record) -> Record:
    """Read candidate, round and control off the id: it ended in the seed, the round of a timing, or a control's
    precision."""
    fields = {key: value for key, value in record.items() if key != "fresh"}
    turn = re.search(r"-round(\d+)$", record["id"])
    return fields | {
        "candidate": re.sub(r"-s-?\d+$", "", record["id"]),
        "fresh_process": record["fresh"],
        "round": int(turn[1]) if turn else None,
        "control": record["stage"] == "equivalence" and record["id"].endswith("-float32"),
    }


def _reasoned(record: Record) -> Record:
    return {**record, "reason": _split(record["reason"])[1]}


def _ended(record: Record) -> Record:
    found = _REUSED.search(record["reason"])
    said = record["reason"][: found.start()] if found else record["reason"]
    cause, reason = _split(said)
    reused = {"day": found[1], "run_dir": found[2]} if found else None
    return {**record, "cause": cause, "reason": reason, "reused": reused}


def _split(reason: str) -> tuple[Cause | None, str]:
    """Return (the cause that a reason began with, the rest of it)."""
    code, colon, prose = reason.partition(": ")
    if not colon or code not in {str(cause) for cause in Cause}:
        return None, reason
    cause = Cause(code)
    return (Cause.HOST_MEMORY if cause is Cause.OUT_OF_MEMORY and prose.startswith(_HOST_RAN_OUT) else cause), prose


def _concluded(record: Record) -> Record:
    """Move `bad_input`, which a failed frontier kept among its findings, to its own field."""
    fields = {key: value for key, value in record.items() if key != "values"}
    values = record["values"]
    bad_input = bool(values.get("bad_input"))
    findings = _frontier(values) if record["stage"] == "frontier" and "micro_batch_size" in values else values
    return fields | {"findings": None if bad_input or not values else findings, "bad_input": bad_input}


_MODE = ("activation_checkpointing", "compile", "precision", "cross_entropy", "seq_len")


def _frontier(values: Record) -> Record:
    """Group the frontier's findings into points: modes, sizes and measurements were keys of one flat dictionary."""
    kept = ("winner", "limit_bytes", "fitting", "front", "knee")
    baseline = {"mode": _mode(values["baseline_mode"]), "micro_batch_size": values["baseline_micro_batch_size"]}
    second = values.get("second_largest")
    return {key: values[key] for key in kept} | {
        "chosen": _measured_point(values),
        "baseline": baseline,
        "largest": _measured_point(values["largest"]),
        "second_largest": second and _measured_point(second),
        "other_lengths": [
            {"seq_len": int(length), "fastest": _measured_point(found), "largest_micro_batch_size": found["largest"]}
            for length, found in values.get("other_lengths", {}).items()
        ],
    }


def _measured_point(values: Record) -> Record:
    return {"mode": _mode(values)} | {
        key: values[key] for key in ("micro_batch_size", "tokens_per_second", "peak_memory_bytes")
    }


def _mode(values: Record) -> Record:
    return {key: values[key] for key in _MODE if key in values}


_CHANGES: dict[str, Callable[[Record], Record]] = {
    "facts_read": _facts, "proposed": _proposed, "concluded": _concluded, "ended": _ended, "paused": _reasoned,
    "promoted": _reasoned, "interrupted": _reasoned,
}  # fmt: skip
