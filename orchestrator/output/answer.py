"""The answer in five lines, the same wherever a person reads it: what to train with, how sure that is, what it gains, what limits it
most, and what to do next. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import StrEnum

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.output.caveats import caveats_of, worth_a_longer_run
from batchscout.orchestrator.output.deciding import ToDecide, to_decide
from batchscout.orchestrator.output.known import Known, known_of
from batchscout.orchestrator.output.verdict import open_text, saved_text, settings_text, wasted_text
from batchscout.orchestrator.stages.horizons import nearest_run
from batchscout.orchestrator.stages.too_short import in_words
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.user_code import OBJECTS

RUN_DIR = "RUN_DIR"
"""Stands for the run directory in a command: its study does not know where it lies."""


class Badge(StrEnum):
    """How sure an answer is."""

    DECIDED = "decided"
    """No other setting that was compared is likely to save a useful gain."""
    UNDETERMINED = "undetermined"
    """Another setting may be better by more than that, or nothing is known of it."""
    KEEP_YOURS = "keep yours"
    """No other setting is shown to be better than the user's own."""
    TOO_SHORT = "too short to tell"
    """Undetermined, and batches that train much faster are too large for so short a run."""


@dataclass(frozen=True)
class Answer:
    """The recommendation in five lines."""

    settings: str
    """What to train with."""
    badge: Badge
    because: str
    """What the badge rests on."""
    gain: str
    """What it saves of the training time with the user's own setting."""
    caveats: tuple[str, ...]
    """What speaks against it or limits it; what matters most first. There is always one."""
    next: str
    """A command, in which RUN_DIR stands for the run directory, or what to do in words."""

    @property
    def is_decided(self) -> bool:
        return self.badge is Badge.DECIDED

    def lines(self, run_dir: str = RUN_DIR, others_are: str = "in the report") -> dict[str, str]:
        """Return the five lines under the words that they begin with. run_dir: as the user would type it. others_are: where the other
        caveats stand."""
        first, *others = self.caveats
        more = f" (and {len(others)} more {others_are})" if others else ""
        return {
            "Train with": self.settings,
            "Verdict": f"{self.badge}: {self.because}",
            "Gain": self.gain,
            "Caveat": first + more,
            "Next": self.next.replace(RUN_DIR, run_dir),
        }

    def text(self, run_dir: str = RUN_DIR) -> str:
        """Return the five lines one under the other."""
        return "\n".join(f"{label:{_LABEL}}{said}" for label, said in self.lines(run_dir).items())


_LABEL = len("Train with") + 2


def answer_of(config: StudyConfig, study: Study, winner: Trial, trial: TrialConfig) -> Answer:
    """trial: the run that is recommended, which is the winner's or, carried to its length, the real run's."""
    known = known_of(config, study, winner)
    badge, because = _how_sure(config, study, known)
    return Answer(
        settings_text(study, winner, trial),
        badge,
        because,
        saved_text(config, study, winner),
        caveats_of(config, study, winner, nearest_run(study, winner, trial), trial),
        _next(config, study, badge, to_decide(config, study, winner)),
    )


def _how_sure(config: StudyConfig, study: Study, known: Known | None) -> tuple[Badge, str]:
    if known is None:
        return Badge.UNDETERMINED, "how sure that is was not estimated"
    wasted = wasted_text(config, known)
    if known.is_decided and known.regret_time is None:  # a study of an earlier version
        return Badge.DECIDED, f"this batch is the best with probability {next(iter(known.p_best.values())):.2f}"
    if known.is_decided:
        return Badge.DECIDED, f"nothing else that was compared is likely to save {config.useful_gain:.0%}; {wasted}"
    if known.is_open(config.useful_gain) and (short := worth_a_longer_run(config, study)):
        return Badge.TOO_SHORT, in_words(short)
    if known.keeps_own and not known.is_open(config.useful_gain):
        return Badge.KEEP_YOURS, f"nothing else is shown to save {config.useful_gain:.0%}; {wasted}"
    return Badge.UNDETERMINED, "; ".join(filter(None, [open_text(config, known), wasted]))


def _next(config: StudyConfig, study: Study, badge: Badge, deciding: ToDecide | None) -> str:
    if badge is Badge.KEEP_YOURS:
        return "nothing to change"
    if badge is Badge.TOO_SHORT:
        budget = max(one.sample_budget for one in worth_a_longer_run(config, study))
        deciding = ToDecide("", {"sample_budget": budget}, goes_on=False)
    if deciding is None or not deciding.keys:
        return f"batchscout export {RUN_DIR}"
    changes = [
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in deciding.keys.items()
    ]
    if config.model.target.startswith(OBJECTS):  # no command has the objects
        return f"decide it: {', '.join(changes)}{'' if deciding.goes_on else ', in another run_dir'}"
    flags = " ".join(f"--set {shlex.quote(change)}" for change in changes)
    return f"batchscout run {RUN_DIR}/study.yaml --dir {RUN_DIR}{'' if deciding.goes_on else '-longer'} {flags}"
