"""A check, and what several come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "fault"]
"""ok: a study works here as far as this goes. warning: it works, and something will be slower, or less sure. fault: something that was
asked for does not work."""


@dataclass(frozen=True)
class Check:
    name: str
    finding: str
    verdict: Verdict = "ok"
    remedy: str = ""
    """What to do; empty where all is well."""


def worst(checks: list[Check]) -> Verdict:
    verdicts = {check.verdict for check in checks}
    return "fault" if "fault" in verdicts else "warning" if "warning" in verdicts else "ok"
