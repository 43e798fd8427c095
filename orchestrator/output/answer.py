"""The answer in five lines, the same wherever a person reads it: what to train with, how sure that is, what it gains, what limits it
most, and what to do next. Pure."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from enum import StrEnum

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.mode import mode_of
from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.output.caveats import caveats_of, not_carried, projected, too_easy, worth_a_longer_run
from batchscout.orchestrator.output.deciding import ToDecide, runs_of_length, to_decide
from batchscout.orchestrator.output.known import Known, baseline_run, chosen_from, failed_stage, known_of
from batchscout.orchestrator.output.verdict import (
    open_text,
    overfitting_text,
    place_text,
    saved_text,
    settings_text,
    useful_text,
    wasted_text,
)
from batchscout.orchestrator.stages import change_of, stage_of
from batchscout.orchestrator.stages.estimates.ranking import standings
from batchscout.orchestrator.stages.horizons import nearest_run
from batchscout.orchestrator.stages.too_short import in_words
from batchscout.orchestrator.stages.train import has_own, not_run
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Trial
from batchscout.orchestrator.units import listed
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.notices import NoticeKind
from batchscout.trainers.user_code import OBJECTS

RUN_DIR = "RUN_DIR"
"""Stands for the run directory in a command: its study does not know where it lies."""
STUDY_FILE = f"{RUN_DIR}/study.yaml"


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
    """A command, in which RUN_DIR stands for the run directory, in a line of its own below what it is for, if that is to be said; or what
    to do in words."""

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
            "Next": with_run_dir(self.next, run_dir),
        }

    def text(self, run_dir: str = RUN_DIR) -> str:
        """Return the five lines one under the other."""
        lines = self.lines(run_dir).items()
        return "\n".join(f"{label:{_LABEL}}{said}".replace("\n", "\n" + " " * _LABEL) for label, said in lines)


_LABEL = len("Train with") + 2


def with_run_dir(command: str, run_dir: str) -> str:
    """Return the command for this run directory. No study file is read from an object store: there STUDY.yaml stands for the user's own."""
    if "://" in run_dir:
        command = command.replace(STUDY_FILE, "STUDY.yaml")
    return command.replace(RUN_DIR, run_dir)


def how_to_resume(config: StudyConfig, study: Study, run_dir: str) -> str:
    """Return what goes on with a study that was stopped."""
    if config.model.target.startswith(OBJECTS):  # no command has the objects
        return f"call batchscout.find again, with run_dir={run_dir}"
    return with_run_dir(_run(study, RUN_DIR), run_dir)


def _run(study: Study, where: str) -> str:
    """Return the command that runs the study there, on the cluster on which it ran last."""
    return " ".join(["batchscout run", STUDY_FILE, f"--dir {where}", *map(shlex.quote, study.cluster_options)])


def answer_of(config: StudyConfig, study: Study, winner: Trial, trial: TrialConfig) -> Answer:
    """trial: the run that is recommended, which is the winner's or, carried to its length, the real run's."""
    deciding = to_decide(config, study, winner)
    badge, because = _how_sure(config, study, winner)
    if deciding and not deciding.keys and badge is Badge.UNDETERMINED:
        because += f"; to decide it: {deciding.words}"
    gain, is_own_form = saved_text(config, study, winner), _is_own_form(config, trial)
    if badge is Badge.KEEP_YOURS and not is_own_form:
        gain = "nothing by batch and learning rate: they are your own, in the fastest form that was measured"
    return Answer(
        settings_text(config, study, winner, trial),
        badge,
        because,
        gain,
        caveats_of(config, study, winner, nearest_run(study, winner, trial), trial),
        "nothing to change" if badge is Badge.KEEP_YOURS and is_own_form else _next(config, study, badge, deciding),
    )


def _is_own_form(config: StudyConfig, trial: TrialConfig) -> bool:
    """True if the batch is split as the user's own is, and trained in the same mode, as far as the study file says so: where that says
    nothing of compiling, the user's own training is taken for one that does not, as exports then say to compile."""
    own, base = config.batch, base_trial(config, None)
    return (
        own.micro_batch_size in (None, trial.micro_batch_size)
        and own.gradient_accumulation_steps in (None, trial.gradient_accumulation_steps)
        and mode_of(trial) == mode_of(base.model_copy(update={"compile": config.compile or False}))
    )


def _how_sure(config: StudyConfig, study: Study, winner: Trial) -> tuple[Badge, str]:
    known = known_of(config, study, winner)
    if not_seen := projected(config, study, winner) or too_easy(config, study, winner):
        return Badge.UNDETERMINED, not_seen
    badge, because = _how_well_compared(config, study, winner, known)
    if badge not in (Badge.DECIDED, Badge.KEEP_YOURS):
        return badge, because
    if open_still := _what_is_open(config, study, winner):
        return Badge.UNDETERMINED, open_still
    change = change_of(config, study, winner)
    if change is None:
        return badge, because
    more = f"{change.in_words(winner.config) or 'the growing batch'} lowers the loss by more than seeds vary"
    stays = "batch and learning rate are your own" if badge is Badge.KEEP_YOURS else because
    return Badge.DECIDED, f"{stays}; {more}"


def _how_well_compared(config: StudyConfig, study: Study, winner: Trial, known: Known | None) -> tuple[Badge, str]:
    if known and known.overfitting:
        return Badge.UNDETERMINED, overfitting_text(known.overfitting)
    is_open = known is None or known.is_open(config.useful_gain)
    if is_open and (short := worth_a_longer_run(config, study)):
        return Badge.TOO_SHORT, in_words(short)
    if known is None:
        if len(standings(chosen_from(config, study))) == 1:
            return Badge.UNDETERMINED, "only one run ended, so nothing was compared"
        return Badge.UNDETERMINED, f"{place_text(config, study, winner)}; how much of that is chance is not known"
    wasted = wasted_text(config, known)
    if known.is_decided or (known.keeps_own and not is_open and not has_own(study)):
        return Badge.DECIDED, f"nothing else that was compared is likely to save {useful_text(config)}; {wasted}"
    if known.keeps_own and not is_open:
        saves = f"nothing else is shown to save {useful_text(config)}; {wasted}"
        if own := not_run(config, study, baseline_run(study)):
            return (
                Badge.UNDETERMINED,
                f"your own effective batch {own} was not run; against the nearest that was, {saves}",
            )
        return Badge.KEEP_YOURS, saves
    return Badge.UNDETERMINED, "; ".join(filter(None, [open_text(config, known), wasted]))


def _what_is_open(config: StudyConfig, study: Study, winner: Trial) -> str:
    """Return why what was compared well does not decide; empty where it does."""
    to_come = [
        keys.type for keys in config.stages if stage_of(keys).trains_candidates and keys.type not in study.conclusions
    ]
    if to_come and (failed := failed_stage(study)):
        return f"the study ended at {failed.stage}, so {listed(to_come)} did not run"
    if to_come:
        return f"the study has not ended: {listed(to_come)} {'is' if len(to_come) == 1 else 'are'} still to come"
    if not_carried(config, study, winner):
        return "batches were compared for runs of the study's length, and not of the real run's"
    if any(notice.kind is NoticeKind.VALIDATES_ON_TRAINING for notice in study.notices.get(None, [])):
        return "its validation samples are training samples"
    return ""


def _next(config: StudyConfig, study: Study, badge: Badge, deciding: ToDecide | None) -> str:
    if badge is Badge.TOO_SHORT:
        budget = max(one.sample_budget for one in worth_a_longer_run(config, study))
        deciding = ToDecide("full runs that are long enough", keys=runs_of_length(config, budget), goes_on=False)
    if deciding is None or not deciding.keys or badge is Badge.DECIDED:
        return f"batchscout export {RUN_DIR}"
    changes = [
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in deciding.keys.items()
    ]
    if config.model.target.startswith(OBJECTS):  # no command has the objects
        return f"decide it by {', '.join(changes)}{'' if deciding.goes_on else ', in another run_dir'}: {deciding.what}"
    flags = " ".join(f"--set {shlex.quote(change)}" for change in changes)
    other = "shorter" if deciding.keys.get("sample_budget", math.inf) < config.sample_budget else "longer"
    where = RUN_DIR if deciding.goes_on else f"{RUN_DIR}-{other}"
    return f"{deciding.what}:\n{_run(study, where)} {flags}"
