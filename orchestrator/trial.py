"""`batchscout trial`: one run in this process, with the batch that the study file's `batch` gives."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from batchscout.orchestrator import preflight
from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.output.progress import metrics_line
from batchscout.orchestrator.terminal import printable, show_exception
from batchscout.trainers.counted import Counted, rate_unit
from batchscout.trainers.files import make_private_directory

if TYPE_CHECKING:
    from batchscout.trainers.report import Report


def run_trial(config: StudyConfig, run_dir: Path) -> int:
    """Train and print every report; a second call with the same configuration goes on from its checkpoint.

    Returns the exit code.
    """
    trial = base_trial(config, int(config.memory_limit) if config.memory_limit else None)
    counted = preflight.check_trial(config, trial)
    make_private_directory(run_dir)
    from batchscout.trainers.loop import train

    digest = hashlib.sha256(trial.model_dump_json().encode()).hexdigest()[:8]
    name = f"{trial.split}-lr{trial.learning_rate:.3g}-{digest}"
    try:
        train(trial, functools.partial(print_report, counted), run_dir / name)
    except ValueError as error:  # the user's code may raise it too, and whoever debugs that wants the traceback
        show_exception(type(error), error, error.__traceback__)
        return 1
    return 0


def print_report(counted: Counted, report: Report) -> None:
    """Print the report in one line."""
    if report.notice is not None:
        return print(printable(report.notice.text), flush=True)
    return print(f"{report.samples_seen:>10,} samples  {metrics_line(report.metrics, rate_unit(counted))}", flush=True)
