"""`batchscout trial`: one run in this process, with the batch that the study file's `batch` gives."""

from __future__ import annotations

import hashlib
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import preflight
from orchestrator.config.keys import StudyConfig
from orchestrator.config.trial import base_trial
from orchestrator.output.progress import metrics_line

if TYPE_CHECKING:
    from trainers.report import Report


def run_trial(study: StudyConfig, run_dir: Path) -> int:
    """Train and print every report; a second call with the same configuration goes on from its checkpoint.

    Returns the exit code.
    """
    config = base_trial(study, int(study.memory_limit) if study.memory_limit else None)
    preflight.check_trial(study, config)
    from trainers.loop import train

    digest = hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:8]
    name = f"m{config.micro_batch_size}k{config.gradient_accumulation_steps}-lr{config.learning_rate:.3g}-{digest}"
    try:
        train(config, print_report, run_dir / name)
    except ValueError:  # the user's code may raise it too, and whoever debugs that wants the traceback
        traceback.print_exc()
        return 1
    return 0


def print_report(report: Report) -> None:
    """Print the report in one line."""
    print(f"{report.samples_seen:>10,} samples  {metrics_line(report.metrics)}", flush=True)
