"""`batchscout run` in a process of its own, to be struck, and what its journal says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from batchscout.orchestrator.study.events import Concluded, Ended, Evaluated, Event, Paused, Promoted
from batchscout.orchestrator.study.journal import replay
from batchscout.orchestrator.study.lines import read_lines
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import TrialState
from batchscout.trainers.notices import heard_by
from tests.support.processes import of_a_driver_on

PATIENCE_SECONDS = 240
DECISIONS = (Promoted, Paused, Ended, Concluded)


class Driver:
    """On a cluster that is there, or on one of its own."""

    def __init__(self, folder: Path, study: dict[str, Any], address: str | None, run_dir: Path | None = None) -> None:
        """run_dir: `run` in the folder by default."""
        (folder / "study.yaml").write_text(yaml.safe_dump(study))
        self.run_dir, self.name = run_dir or folder / "run", study["name"]
        self.command = [
            sys.executable, "-m", "batchscout", "run", str(folder / "study.yaml"), "--dir", str(self.run_dir),
            *(["--address", address] if address else []),
        ]  # fmt: skip
        self.environment = {**os.environ, **of_a_driver_on(address or "")}
        self.process: subprocess.Popen[str] | None = None

    def start(self, **options: Any) -> None:
        options = {"env": self.environment} | options
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
        )

    def wait_until(self, condition: Callable[[list[Event]], bool]) -> None:
        """Until the journal says so."""
        assert self.process is not None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition(self.events()):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "the study did not get there"
            time.sleep(0.05)

    def send(self, number: signal.Signals) -> tuple[int, str]:
        assert self.process is not None
        self.process.send_signal(number)
        return self.end()

    def end(self, seconds: float = PATIENCE_SECONDS) -> tuple[int, str]:
        """(exit code, output). One that does not end in time is killed, so that it is in no other test's way."""
        assert self.process is not None
        try:
            output, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            output, _ = self.process.communicate()
            raise AssertionError(f"the study still ran after {seconds:g} s:\n{output}") from None
        return self.process.returncode, output

    def ends_within(self, seconds: float) -> bool:
        assert self.process is not None
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def events(self) -> list[Event]:
        """Without a damaged last line, of which the driver itself tells."""
        with heard_by(lambda notice: None):
            return [line.event for line in read_lines(self.run_dir / "journal.jsonl")]

    def study(self) -> Study:
        return replay(self.run_dir / "journal.jsonl", self.name)


def decisions(events: list[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, DECISIONS)]


def has(kind: str, count: int = 1) -> Callable[[list[Event]], bool]:
    return lambda events: sum(event.kind == kind for event in events) >= count


def check_nothing_was_lost_or_doubled(events: list[Event], study: Study) -> None:
    """No trial ended twice, no evaluation made twice, and none missing.

    events: of the journal of which `study` is the state.
    """
    ended = [event.id for event in events if isinstance(event, Ended)]
    assert len(ended) == len(set(ended))
    evaluated = [(event.id, event.metrics["samples_seen"]) for event in events if isinstance(event, Evaluated)]
    assert len(evaluated) == len(set(evaluated))
    for trial in study.trials.values():
        seen = [point["samples_seen"] for point in trial.history]
        wanted = sorted({*trial.config.rungs, *trial.config.evaluations})
        assert seen == wanted[: len(seen)]
        if trial.state is TrialState.COMPLETE:
            assert seen == wanted
