"""What is known of a study: values, built by replaying the journal. Nothing here acts."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import JsonValue

from batchscout.orchestrator.config.mode import mode_of
from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import (
    ClusterReady,
    Concluded,
    Ended,
    Evaluated,
    Event,
    FactsRead,
    Interrupted,
    LanesChanged,
    Noticed,
    Paused,
    Promoted,
    Proposed,
    Reopened,
    Retried,
    RunBegan,
    RunStopped,
    StageBegan,
    Started,
    TrialEvent,
)
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.messages import HeldLane
from batchscout.orchestrator.study.trial import Hold, Metrics, Trial, TrialState
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.notices import Notice
from batchscout.trainers.report import Known


class Halted(Exception):
    """Nothing more can run for now: no lane, or storage that refuses. The trials wait for the next run of the study."""


@dataclass(frozen=True)
class Conclusion:
    """What a stage found: a sentence for people, and findings for the stages after it."""

    stage: str
    ok: bool
    reason: str
    findings: JsonValue = None
    """As the stage's own type says it; `batchscout.orchestrator.stages.findings` reads it back into that type."""
    notes: tuple[str, ...] = ()
    bad_input: bool = False
    """True if what the user gave cannot be run, and nothing else is wrong."""

    @functools.cached_property
    def typed(self) -> dict[type, Any]:
        """The findings in the stage's own type, once they have been read."""
        return {}


@dataclass
class Study:
    """The replay of a journal so far. `apply` is the only way it changes."""

    name: str
    trials: dict[str, Trial] = field(default_factory=dict)
    conclusions: dict[str, Conclusion] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    """Stages, in the order in which they began."""
    facts: Facts = field(default_factory=Facts)
    tokens: set[str] = field(default_factory=set)
    """Those of all drivers that have run the study."""
    ready: dict[str, float] = field(default_factory=dict)
    """For each driver, by its token: the seconds from its command until the cluster was there."""
    lanes: list[LanesChanged] = field(default_factory=list)
    """How the lanes came and went, where the cluster grows and shrinks: of all drivers, one after the other."""
    notices: dict[str | None, list[Notice]] = field(default_factory=dict)
    """What trials met and dealt with, by their ids; what drivers met is under None."""
    withdrawn: dict[str, Trial] = field(default_factory=dict)
    """The trials of stages that are open again because one before them is, until their stages ask for them."""
    lane_seconds: float = field(default=0.0, init=False, compare=False)
    """How long all trials together have held their lanes, as far as the journal tells."""
    most_lanes: int = field(default=1, init=False, compare=False)
    """How many lanes trials have run on."""
    given: dict[str, JsonValue] = field(default_factory=dict, init=False, compare=False)
    """The keys of the study that its file and options gave when it began; none where an earlier version did not write them."""
    told: tuple[str, ...] = field(default=(), init=False, compare=False)
    """Where it differs from the object that its `from` names, one sentence each."""
    cluster_options: tuple[str, ...] = field(default=(), init=False, compare=False)
    """With which options of `batchscout run` the last driver found its cluster."""
    began: float | None = field(default=None, init=False, compare=False)
    """The time of the first event, in seconds since 1970; None before there is one."""
    last: float | None = field(default=None, init=False, compare=False)
    """The time of the last event."""
    _heard: float = field(default=0.0, init=False, compare=False)
    """The time of the last event of a trial: the next driver may write of other things before it takes the study up."""
    _stops: set[float] = field(default_factory=set[float], init=False, compare=False)
    """When drivers stopped in order."""
    num_events: int = field(default=0, init=False, compare=False)
    """How many events were applied so far. While it stays the same, so does whatever is computed from the study."""

    @property
    def lanes_text(self) -> str:
        """Return how many lanes there are now, for people; empty where the cluster does not grow, or before it has a lane."""
        if not self.lanes:
            return ""
        last = self.lanes[-1]
        return f"lanes: {last.lanes} of up to {last.most} ({last.reason})"

    @property
    def startup_seconds(self) -> list[float]:
        return list(self.ready.values())

    @property
    def begins_again(self) -> bool:
        """True if trials wait to be tried again, and nothing has been measured that they would be compared with."""
        trials = self.trials.values()
        return any(t.earlier_tries for t in trials) and not any(t.state.ended or t.history for t in trials)

    @property
    def completed_runs(self) -> list[Trial]:
        """The full runs that completed, of whatever stage."""
        return [trial for trial in self.trials.values() if trial.is_full_run and trial.state is TrialState.COMPLETE]

    def is_over(self, stages: Iterable[StageKeys]) -> bool:
        """True if all of these stages are concluded, or one has failed: the stages after it would have nothing to go
        by."""
        failed = any(not conclusion.ok for conclusion in self.conclusions.values())
        return failed or all(stage.type in self.conclusions for stage in stages)

    def of_stage(self, stage: str) -> list[Trial]:
        """Return the stage's trials in the order they were proposed."""
        return [trial for trial in self.trials.values() if trial.stage == stage]

    def count(self, stage: str, *states: TrialState) -> int:
        """Return how many of the stage's trials are in one of these states."""
        return sum(trial.state in states and trial.stage == stage for trial in self.trials.values())

    def in_state(self, stage: str, state: TrialState) -> list[Trial]:
        """Return the stage's trials in this state: those let past the most rungs first, then in the order proposed."""
        found = [trial for trial in self.trials.values() if trial.stage == stage and trial.state is state]
        return sorted(found, key=lambda trial: -len(trial.promoted))

    def furthest(self, stage: str, state: TrialState) -> Trial | None:
        """Return the first trial of `in_state`; None if there is none."""
        return next(iter(self.in_state(stage, state)), None)

    def known(self, trial: Trial) -> Known:
        """Return what the journal knows of a trial's run: its checkpoint may not tell of more."""
        seen = [point.get("samples_seen") for point in trial.history]
        return Known(frozenset(self.tokens), frozenset(int(samples) for samples in seen if samples is not None))

    def candidates(self, stage: str) -> dict[str, list[Trial]]:
        """Return the stage's trials by their candidates, in the order proposed."""
        found: dict[str, list[Trial]] = {}
        for trial in self.of_stage(stage):
            found.setdefault(trial.candidate, []).append(trial)
        return found

    def seeds_of(self, trial: Trial) -> list[Trial]:
        """Return the trials that share its candidate, itself among them, in the order proposed."""
        return [other for other in self.of_stage(trial.stage) if other.candidate == trial.candidate]

    def speed_rivals(self, trial: Trial) -> list[Trial]:
        """Return the trials of its stage that have its effective batch in another split or mode."""
        mine, batch = speed_kind(trial.config), trial.config.effective_batch_size
        return [
            other
            for other in self.of_stage(trial.stage)
            if other.config.effective_batch_size == batch and speed_kind(other.config) != mine
        ]

    def apply(self, event: Event) -> None:
        """Take in one event. An event that was applied before changes nothing."""
        self.num_events += 1
        self._take_in(event)
        if isinstance(event, TrialEvent):
            self._heard = event.time
        self.began = event.time if self.began is None else self.began
        self.last = event.time

    def _take_in(self, event: Event) -> None:
        match event:
            case RunBegan():
                is_new = event.token not in self.tokens
                self.tokens.add(event.token)
                self.given, self.told = self.given or event.given, self.told or event.told
                self.cluster_options = event.cluster_options
                for trial in self._left_running(self._heard, is_new=is_new):
                    self._put(replace(trial, state=TrialState.WAITING))
                self._close_lanes(event.time)
            case RunStopped():
                for trial in self._left_running(event.time, is_new=event.time not in self._stops):
                    self._put(trial)
                self._stops.add(event.time)
            case LanesChanged():
                if event not in self.lanes[-1:]:
                    self.lanes.append(event)
            case ClusterReady():
                self.ready[event.token] = event.seconds
            case FactsRead():
                self.facts = self.facts.updated(event.facts)
            case StageBegan():
                if event.stage not in self.started:
                    self.started.append(event.stage)
            case Reopened():
                self._reopen(event.stage)
            case Noticed():
                notices, notice = self.notices.setdefault(event.id, []), Notice(event.notice, event.reason)
                if notice not in notices:
                    notices.append(notice)
            case Concluded():
                fields = event.model_dump(exclude={"kind", "version", "time"})
                self.conclusions[event.stage] = Conclusion(**fields)
            case Proposed():
                if event.id not in self.trials:
                    self._propose(event)
            case Retried():
                trial = self.trials[event.id]
                if trial.state.ended:
                    self._put(_as_it_was(trial) if event.from_checkpoint else _from_its_beginning(trial))
            case _:
                trial = self.trials[event.id]
                if not trial.state.ended:  # what has ended never changes again
                    self._put(changed(trial, event))

    def _left_running(self, time: float, *, is_new: bool) -> list[Trial]:
        """Return the trials that a driver left running, without their lanes from that time on, and with what they had held them for: no event of
        theirs will tell that. is_new: False where it was counted before, as the event comes once more."""
        found = []
        for trial in [trial for trial in self.trials.values() if trial.state is TrialState.RUNNING]:
            freed = _freed(trial, time, lost=True)
            held = max(0.0, time - trial.holds[-1].began) if is_new and freed is not trial else 0.0
            found.append(replace(freed, seconds=trial.seconds + held))
        return found

    def _propose(self, event: Proposed) -> None:
        """Add the trial that a stage wants: the one that it has wanted before, if that is the same run."""
        proposal, before = event.proposal(), self.withdrawn.pop(event.id, None)
        if before is None or before.config != proposal.config:
            self._put(Trial(proposal, metrics={**event.expected}))
        else:
            self.lane_seconds -= before.seconds  # it was counted when it ran
            self._put(replace(before, proposal=proposal, metrics=before.metrics | event.expected))

    def _reopen(self, stage: str) -> None:
        """Take back what the stage, and those after it, concluded; withdraw the trials of those after it."""
        later = self.started[self.started.index(stage) + 1 :]
        self.started = [name for name in self.started if name not in later]
        for name in (stage, *later):
            self.conclusions.pop(name, None)
        for trial in [trial for trial in self.trials.values() if trial.stage in later]:
            self.withdrawn[trial.id] = self.trials.pop(trial.id)

    def _close_lanes(self, time: float) -> None:
        """Note that the lanes of the driver before have ended with it."""
        if self.lanes and self.lanes[-1].lanes:
            self.lanes.append(
                LanesChanged(time=time, lanes=0, most=self.lanes[-1].most, reason="another driver begins")
            )

    def _put(self, trial: Trial) -> None:
        """Add or replace a trial. Nothing else may write to `trials`."""
        before = self.trials.get(trial.id)
        self.trials[trial.id] = trial
        self.lane_seconds += trial.seconds - (before.seconds if before else 0.0)
        for lane in [hold.lane for hold in trial.holds[-1:] if hold.lane]:
            self.most_lanes = max(self.most_lanes, lane.number + 1)


def speed_kind(config: TrialConfig) -> tuple[object, ...]:
    """Return what decides a trial's speed: trials of one study and one batch that share it differ by the machine's noise alone."""
    return config.micro_batch_size, mode_of(config)


def _from_its_beginning(trial: Trial) -> Trial:
    """Return an ended trial as it waits to be tried again; the time that it took is spent."""
    tries = (*trial.earlier_tries, trial.how_it_ended)
    return Trial(trial.proposal, metrics={**trial.proposal.expected}, earlier_tries=tries, seconds=trial.seconds)


def _as_it_was(trial: Trial) -> Trial:
    """Return a trial that was stopped as it was before: it waits for a lane, or at a rung for what others come to there."""
    waits_at_rung = trial.paused_at - trial.promoted
    state, cause = (TrialState.PAUSED, Cause.RUNG) if waits_at_rung else (TrialState.WAITING, None)
    return replace(trial, state=state, cause=cause, reason="")


def changed(trial: Trial, event: TrialEvent) -> Trial:
    """Return the trial after the event; the trial must not have ended."""
    if isinstance(event, Evaluated | Paused | Interrupted | Ended):
        trial = heard_from(trial, event.lane)
    match event:
        case Started():
            # An event that comes once more begins no other hold.
            before = itertools.takewhile(lambda hold: hold.began != event.time, trial.holds)
            return replace(trial, state=TrialState.RUNNING, holds=(*before, Hold(event.time)))
        case Evaluated():
            return _evaluated(trial, event)
        case Paused():
            seconds = trial.seconds + (0 if event.rung in trial.paused_at else event.seconds)
            paused_at = trial.paused_at | {event.rung}
            paused = replace(_freed(trial, event.time), state=TrialState.PAUSED, cause=Cause.RUNG, reason=event.reason)
            return replace(paused, seconds=seconds, paused_at=paused_at)
        case Promoted():
            state = TrialState.WAITING if trial.state is TrialState.PAUSED else trial.state
            promoted = trial.promoted | {event.rung}
            return replace(trial, state=state, cause=Cause.RUNG, reason=event.reason, promoted=promoted)
        case Interrupted():
            if trial.state is not TrialState.RUNNING:
                return trial
            freed = _freed(trial, event.time, lost=True)
            waiting = replace(freed, state=TrialState.WAITING, cause=Cause.INTERRUPTED, reason=event.reason)
            seconds = trial.seconds + event.seconds
            return replace(waiting, interruptions=trial.interruptions + 1, seconds=seconds)
        case Ended():
            freed = _freed(trial, event.time)
            ended = replace(freed, state=event.state, cause=event.cause, reason=event.reason, reused=event.reused)
            metrics = trial.metrics | _with_shared_names(event.metrics)
            return replace(ended, metrics=metrics, seconds=trial.seconds + event.seconds)


def heard_from(trial: Trial, lane: HeldLane | None) -> Trial:
    """Return the trial with the lane that it has spoken from, if it holds one."""
    if lane is None or not trial.holds or trial.holds[-1].ended is not None:
        return trial
    return replace(trial, holds=(*trial.holds[:-1], replace(trial.holds[-1], lane=_shared(lane))))


@functools.cache
def _shared(lane: HeldLane) -> HeldLane:
    """Return one object for all that are equal: every line of the journal would bring its own."""
    return lane


def _freed(trial: Trial, time: float | None, *, lost: bool = False) -> Trial:
    """Return the trial without a lane, from that time on."""
    if not trial.holds or trial.holds[-1].ended is not None:
        return trial
    return replace(trial, holds=(*trial.holds[:-1], replace(trial.holds[-1], ended=time, lost=lost)))


def _evaluated(trial: Trial, event: Evaluated) -> Trial:
    metrics = _with_shared_names(event.metrics)
    is_known = trial.was_evaluated_at(metrics.get("samples_seen"))
    history = trial.history if is_known else (*trial.history, metrics)
    rungs = event.rungs | trial.rungs
    return replace(trial, metrics=trial.metrics | metrics, history=history, rungs=rungs, interruptions=0)


def _with_shared_names(metrics: Metrics) -> Metrics:
    """Return the metrics with interned names: every line of the journal would bring its own copy of each."""
    return {sys.intern(name): value for name, value in metrics.items()}
