"""What a study's runs are called in trackers, so that a study that goes on finds its own, and no other does."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from zlib import crc32

from batchscout.orchestrator.study.trial import Trial
from batchscout.trainers.files import own_file

STUDY_RUN = "study"
"""The run that holds what the study has found, beside those of its trials."""


def run_name(trial: Trial) -> str:
    """Return the trial's id. A trial that is tried again begins anew, in a run of its own."""
    return f"{trial.id}-try{len(trial.earlier_tries) + 1}" if trial.earlier_tries else trial.id


def run_id(study_name: str, name: str, token: str) -> str:
    """Return `<study>-<name>-<token>` in letters and length that trackers take; no two runs share one."""
    wanted = f"{study_name}-{name}"
    allowed = re.sub(r"[^A-Za-z0-9_-]", "-", wanted)[:100]
    return f"{allowed}-{token}" if allowed == wanted else f"{allowed}-{crc32(wanted.encode()):08x}-{token}"


def study_token(run_dir: Path) -> str:
    """Return six letters that belong to the run directory: the same study in another directory must not add to its
    runs."""
    file = run_dir / "tracking-token"
    with own_file(file):
        if not file.exists():
            file.write_text(secrets.token_hex(3))
    with own_file(file, "read"):
        return file.read_text()
