"""TensorBoard: event files in the run directory, which `tensorboard --logdir RUN_DIR/tensorboard` shows."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.output.tracking.runs import STUDY_RUN, Value
from orchestrator.study.trial import Trial

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

FOLDER = "tensorboard"


class TensorBoard:
    """Writes a folder of event files for each trial. A run that goes on adds a file to its folder."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER

    def open(self, trial: Trial) -> TensorBoardRun:
        run = TensorBoardRun(_writer(self._folder / trial.id))
        run.write("config", trial.config.model_dump_json(indent=2))
        return run

    def tell_study(self, summary: Mapping[str, Value]) -> None:
        run = TensorBoardRun(_writer(self._folder / STUDY_RUN))
        run.end(summary, has_failed=False)


class TensorBoardRun:
    """A trial's event file, which is open. Curves are over samples, which TensorBoard calls steps."""

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    def log(self, figures: Mapping[str, float | None], samples: float | None) -> None:
        for name, value in figures.items():
            if name != "samples_seen" and value is not None and math.isfinite(value):
                self._writer.add_scalar(name, value, None if samples is None else int(samples))

    def write(self, name: str, text: str) -> None:
        self._writer.add_text(name, f"    {text}".replace("\n", "\n    "))  # indented, it is no Markdown

    def end(self, summary: Mapping[str, Value], *, has_failed: bool) -> None:
        """has_failed: is in the summary, too, as its state; TensorBoard has no other place for it."""
        del has_failed
        self.write("summary", "\n".join(f"{name}: {value}" for name, value in summary.items() if value is not None))
        self._writer.close()


def _writer(folder: Path) -> SummaryWriter:
    from tensorboardX import SummaryWriter

    # Files are named after the second, and a run that goes on within it would write over its own.
    return SummaryWriter(str(folder), flush_secs=5, filename_suffix=f".{secrets.token_hex(3)}")
