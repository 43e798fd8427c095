"""TensorBoard: event files in the run directory, which `tensorboard --logdir RUN_DIR/tensorboard` shows."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from batchscout.orchestrator.output.tracking.names import STUDY_RUN, run_name
from batchscout.orchestrator.output.tracking.runs import End, Found, Row, Table, finite
from batchscout.orchestrator.study.trial import Trial

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter


class TensorBoard:
    """Writes a folder of event files for each trial. A run that goes on adds a file to its folder."""

    name = "TensorBoard"

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "tensorboard"

    def open(self, trial: Trial) -> TensorBoardRun:
        run = TensorBoardRun(_writer(self._folder / run_name(trial)))
        run.write("config", trial.config.model_dump_json(indent=2))
        return run

    def tell_study(self, found: Found) -> None:
        """TensorBoard shows no files, so of the report only the name is told."""
        writer = _writer(self._folder / STUDY_RUN)
        run = TensorBoardRun(writer)
        for name, table in found.tables.items():
            writer.add_text(name, _markdown(table))
        if found.report is not None:
            run.write("report", f"{found.report.name}, in the run directory")
        run.end(End(found.summary, has_failed=False))


class TensorBoardRun:
    """A trial's event file, which is open. Curves are over samples, which TensorBoard calls steps."""

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for name, value in finite(row.figures).items():
                if name != "samples_seen":
                    self._writer.add_scalar(name, value, None if row.samples is None else int(row.samples))

    def write(self, name: str, text: str) -> None:
        self._writer.add_text(name, f"    {text}".replace("\n", "\n    "))  # indented, it is no Markdown

    def end(self, end: End) -> None:
        """Whether it failed is in the summary, as its state; TensorBoard has no other place for it."""
        self.write("summary", "\n".join(f"{name}: {value}" for name, value in end.summary.items() if value is not None))
        self._writer.close()


def _markdown(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(_cell(value) for value in line)} |" for line in lines)


def _cell(value: object) -> str:
    return "" if value is None else str(value).replace("|", "&#124;").replace("\n", " ")


def _writer(folder: Path) -> SummaryWriter:
    from tensorboardX import SummaryWriter

    # Files are named after the second, and a run that goes on within it would write over its own.
    return SummaryWriter(str(folder), flush_secs=5, filename_suffix=f".{secrets.token_hex(3)}")
