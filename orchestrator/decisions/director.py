"""Runs one stage without knowing Ray: decides which trial is next, what a message means, and what the journal must
hold.

`next_trial`, `proposals`, `wanted` and `is_finished` are questions, and journal nothing. `advance`, `on_started`, `on_message`, `on_relay_lost`,
`on_lanes_changed` and `conclude` tell the Director what happens; they write to the journal, all of them through `_record`. Ray Tune's
scheduler and search algorithm are thin shells around the Director.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.decisions import verdicts
from batchscout.orchestrator.decisions.budget import Spending
from batchscout.orchestrator.decisions.decision import GO_ON, Action, Decision, stop
from batchscout.orchestrator.decisions.observer import Observer
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import (
    Concluded,
    Ended,
    Evaluated,
    Event,
    Interrupted,
    LanesChanged,
    Noticed,
    Paused,
    Promoted,
    StageBegan,
    Started,
    noticed,
    proposed,
)
from batchscout.orchestrator.study.journal import Journal
from batchscout.orchestrator.study.messages import HeldLane, Message
from batchscout.orchestrator.study.reuse import Measurements
from batchscout.orchestrator.study.state import Conclusion, Halted, heard_from, speed_kind
from batchscout.orchestrator.study.trial import Metrics, Proposal, Trial, TrialState
from batchscout.orchestrator.units import counted
from batchscout.trainers.notices import Notice
from batchscout.trainers.step_log import Step

# If this many trials fail, and none did anything else, the fault lies with the stage and not with single trials.
ENOUGH_FAILURES = 3
# A trial that loses its machine this often between two evaluations is not run again.
MAX_INTERRUPTIONS = 5


@dataclass(frozen=True)
class Wanted:
    """What a stage has lanes to be for."""

    num_trials: int
    """Trials that run, or could run now if they had a lane."""
    more_may_come: bool
    """True if trials may follow that nobody has proposed or promoted yet."""


class Director:
    """One stage of a study, from its first trial to its conclusion."""

    def __init__(
        self, context: StageContext[StageKeys], journal: Journal, observers: Sequence[Observer], num_lanes: int,
        is_stopping: Callable[[], bool] = lambda: False, measurements: Measurements | None = None,
        clock: Callable[[], float] = time.monotonic, lanes_now: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        """Begin the stage, or go on with it.

        num_lanes: how many there may be at once. lanes_now: how many there are, where they come and go; None: all of them.
        is_stopping: True once Ctrl-C was pressed. measurements: those of earlier studies, if this stage may reuse them.
        clock: what the seconds are measured with for which trials hold lanes.
        """
        self.context, self.num_lanes = replace(context, num_lanes=num_lanes), num_lanes
        self.journal, self.study, self.stage = journal, journal.study, stage_of(context.stage)
        self._observers, self._is_stopping, self._measurements = observers, is_stopping, measurements
        self._steps: dict[str, list[Step]] = {}
        """All that were heard of each running trial."""
        self._lanes: dict[str, HeldLane] = {}
        """Of each trial that holds one, where it was heard of last."""
        self._spending = Spending(context.config, self.study, clock)
        self._lanes_now = lanes_now or (lambda: num_lanes)
        self._halted = self._impossible = ""
        """Why nothing can run for now; why the stage cannot have a result."""
        self._asked_at = self._judged_at = 0
        """How many events the study had when the stage was last asked for proposals, and when paused trials were last
        judged."""
        if context.stage.type not in self.study.started:
            self._record(StageBegan(stage=context.stage.type))
        for observer in observers:
            observer.stage_began(context.stage)

    # Questions

    def next_trial(self, num_held: int = 0) -> Trial | None:
        """Return the trial to start now; None where all lanes are busy, or nothing may run before another trial ends.

        num_held: how many lanes are still busy with a trial that is to stop.
        """
        if not self._has_a_free_lane(num_held) or self._all_fail():
            return None
        # The furthest trial goes first: the others wait for it.
        return self.study.furthest(self.context.stage.type, TrialState.WAITING)

    def is_finished(self) -> bool:
        """True if every trial that the stage wants has ended."""
        return not self._count(TrialState.WAITING, TrialState.RUNNING, TrialState.PAUSED)

    def wanted(self) -> Wanted:
        """Return how many lanes would have a trial, and whether more may be wanted before the study is over."""
        is_last = self.context.config.stages[-1] is self.context.stage
        settled = is_last and self.stage.proposes_once and not self._count(TrialState.PAUSED)
        return Wanted(self._count(TrialState.WAITING, TrialState.RUNNING), not settled)

    def _has_a_free_lane(self, num_held: int) -> bool:
        return self._count(TrialState.RUNNING) + num_held < self._lanes_now()

    def _all_fail(self) -> bool:
        """True if so many trials have failed, and none has done anything else, that the others would fail, too."""
        if self.stage.fails_by_mode or self._count(TrialState.FAILED) < ENOUGH_FAILURES:
            return False
        if self._count(TrialState.COMPLETE, TrialState.OUT_OF_MEMORY):
            return False
        trials = [trial for trial in self.context.trials() if trial.cause is not Cause.STOPPED]
        ended = [trial for trial in trials if trial.state.ended]
        in_vain = all(t.state is TrialState.FAILED for t in ended) and not any(t.history for t in trials)
        kinds, tried = ({speed_kind(t.config) for t in some} for some in (self.context.trials(), ended))
        return in_vain and len(tried) >= min(ENOUGH_FAILURES, len(kinds))

    # What happens

    def advance(self, num_held: int = 0) -> None:
        """Draw the consequences of what has happened: propose trials, judge those that are paused, give up.

        The scheduler calls this between Tune's events, and only here does Ctrl-C take effect. Raises KeyboardInterrupt
        after Ctrl-C, and Halted where nothing can run for now.
        """
        if self._is_stopping():
            raise KeyboardInterrupt
        self.journal.raise_if_lost()
        if self._halted:
            raise Halted(self._halted)
        self._propose()
        if self._spending.is_spent:
            self._stop_what_waits(Cause.BUDGET, self._spending.reason)
        if self._has_a_free_lane(num_held):
            self._judge_paused()
            self._propose()  # who was cut just now may make room for another
        if self._all_fail() and not self._count(TrialState.RUNNING):
            self._give_up()

    def on_started(self, trial_id: str) -> None:
        self._spending.begin(trial_id)
        self._record(Started(id=trial_id))

    def on_message(self, trial_id: str, message: Message) -> Decision:
        """Take in what a trial said, journal what must not be lost, and decide what becomes of it."""
        trial = self._trial(trial_id)
        if message.lane is not None:
            self._lanes[trial_id] = message.lane
        if trial.state.ended:  # it was cut meanwhile, by the verdict on another seed or at a rung that it repeats
            return Decision(Action.STOP, trial.cause, trial.reason)
        if message.notice is not None:
            self._record(noticed(message.notice, trial_id))
            return GO_ON
        if message.outcome is not None:
            self._on_outcome(trial, message)
            return Decision(Action.STOP)
        for observer in self._observers:
            observer.progressed(trial, {**message.metrics})
        self._hear_steps(trial_id, message.steps)
        heard = heard_from(trial, message.lane)
        decision = verdicts.on_report(self.context, heard, {**message.metrics}, self._steps[trial_id])
        if message.evaluated:
            self._evaluated(trial_id, message)
            if decision.action is not Action.STOP:
                decision = verdicts.on_evaluation(self.context, self._trial(trial_id))
        if decision.action is Action.GO_ON and self._spending.is_spent:
            decision = stop(Cause.BUDGET, self._spending.reason)
        if decision.action is Action.STOP:
            self._end(trial_id, TrialState.PRUNED, decision.cause, decision.reason)
            return decision
        for rung in message.rungs:
            decision = self._on_rung(trial_id, rung)
            if decision.action is not Action.GO_ON:
                return decision
        return GO_ON

    def on_lanes_changed(self, change: LanesChanged) -> None:
        """Journal that lanes have come or gone."""
        self._record(change)

    def on_relay_lost(self, trial_id: str, reason: str) -> None:
        """Take in that the Tune trial was lost. It only relays: the trial itself goes on from its last checkpoint."""
        if self._trial(trial_id).state is TrialState.RUNNING:
            self._on_interrupted(trial_id, reason)

    def conclude(self) -> None:
        conclusion = self._conclusion()
        self._record(Concluded(**asdict(conclusion)))
        if self._measurements:
            for trial_id in self.stage.disturbed(self.context):
                self._measurements.forget(self._trial(trial_id))

    def _conclusion(self) -> Conclusion:
        kind = self.context.stage.type
        if self._impossible:
            return Conclusion(kind, ok=False, reason=self._impossible)
        lacking = self._lacking()
        try:
            conclusion = self.stage.conclude(self.context)
        except ValueError as error:
            return Conclusion(kind, ok=False, reason=str(error))
        if not conclusion.ok:
            return replace(conclusion, reason="; ".join([conclusion.reason, *lacking]))
        return replace(conclusion, notes=(*conclusion.notes, *lacking))

    # Proposals

    def proposals(self) -> list[Proposal]:
        """Return the trials that the stage wants by now.

        Where what earlier stages chose cannot be run it wants nothing more, and ends with that as its result.
        """
        try:
            return self.stage.propose(self.context)
        except ValueError as error:
            self._impossible = str(error)
            return []

    def _propose(self) -> None:
        """Journal the trials that the stage wants by now. Those measured before end at once; then the stage is asked
        again."""
        while new := self._new_proposals():
            known = self._measurements.find(new) if self._measurements else {}
            for wanted in new:
                self._record(proposed(wanted))
                if wanted.id in known:
                    self._record(Ended(id=wanted.id, seconds=0.0, **vars(known[wanted.id])))
            if not known:
                return

    def _new_proposals(self) -> list[Proposal]:
        """Return the proposals that the study does not have yet; asks the stage only if its answer can have changed."""
        if self._asked_at == self.study.num_events or (self._asked_at and self.stage.proposes_once):
            return []
        self._asked_at = self.study.num_events
        states, stage = (TrialState.WAITING, TrialState.RUNNING, TrialState.PAUSED), self.context.stage.type
        begun = (trial for state in states for trial in self.study.in_state(stage, state))
        return self._spending.affordable(wanted, begun) if (wanted := self._wanted()) else []

    def _wanted(self) -> list[Proposal]:
        return [wanted for wanted in self.proposals() if wanted.id not in self.study.trials]

    def _lacking(self) -> list[str]:
        """Return what the study's budget kept the stage from."""
        if self._spending.left() is None:
            return []
        stopped = sum(trial.cause is Cause.BUDGET for trial in self.context.trials())
        verb = "was" if stopped == 1 else "were"
        cut = [f"{counted(stopped, 'trial')} {verb} stopped: {self._spending.reason}"] if stopped else []
        return cut + [self._spending.left_out(one) for one in self._wanted()[:1]]

    def _give_up(self) -> None:
        failed = [trial for trial in self.context.trials() if trial.state is TrialState.FAILED]
        who = "the first trial" if len(failed) == 1 else f"all of the first {len(failed)} trials"
        what = f"{who} failed, so no more were started"
        self._impossible = f"{what}; {failed[-1].id}: {failed[-1].explanation}"
        self._stop_what_waits(Cause.STOPPED, what)

    def _stop_what_waits(self, cause: Cause, why: str) -> None:
        for state in (TrialState.WAITING, TrialState.PAUSED):
            for trial in self.study.in_state(self.context.stage.type, state):
                self._end(trial.id, TrialState.PRUNED, cause, why)

    # Messages

    def _hear_steps(self, trial_id: str, steps: Sequence[Step]) -> None:
        """Keep each step once: after its lane died, a trial goes on from a checkpoint and takes some steps again."""
        heard = self._steps.setdefault(trial_id, [])
        while heard and steps and heard[-1].number >= steps[0].number:
            heard.pop()
        heard.extend(steps)

    def _evaluated(self, trial_id: str, message: Message) -> None:
        """Journal an evaluation that is new. A run that goes on from where it was evaluated last tells of that once more, lest the driver
        had not heard of it, and has got no further: what took its machine down may do so again."""
        if not self._trial(trial_id).was_evaluated_at(message.metrics.get("samples_seen")):
            values = dict.fromkeys(message.rungs, message.metrics.get("val_loss", math.nan))
            self._record(Evaluated(id=trial_id, metrics={**message.metrics}, rungs={**values}, lane=message.lane))

    def _on_outcome(self, trial: Trial, message: Message) -> None:
        match message.outcome:
            case "stopped":
                pass  # it was told to stop: its state is journaled already, or it waits to go on
            case "interrupted":
                self._on_interrupted(trial.id, message.reason)
            case "no_lane" | "no_storage" | "other_code":
                self._halted = message.reason
            case "complete":
                self._on_complete(trial.id, message)
            case outcome:
                cause = message.cause or Cause(outcome)
                self._end(trial.id, TrialState(outcome), cause, message.reason, {**message.metrics})

    def _on_complete(self, trial_id: str, message: Message) -> None:
        """End a trial that ran to its end, which may be pruned all the same."""
        metrics: Metrics = {**message.metrics}
        decision = verdicts.on_end(self.context, metrics, message.steps)
        if decision.action is Action.STOP:
            return self._end(trial_id, TrialState.PRUNED, decision.cause, decision.reason, metrics)
        if "val_loss" in message.metrics:
            self._evaluated(trial_id, message)
        return self._end(trial_id, TrialState.COMPLETE, None, message.reason, metrics)

    def _on_interrupted(self, trial_id: str, reason: str) -> None:
        """Let the trial wait to go on; fail it if it loses machine after machine, since it may be what takes them
        down."""
        times = self._trial(trial_id).interruptions + 1
        if times == MAX_INTERRUPTIONS:
            what = f"its machine was lost {counted(times, 'time')} since its last evaluation; {reason}"
            return self._end(trial_id, TrialState.FAILED, Cause.FAILED, what)
        seconds, lane = self._spending.end(trial_id), self._lanes.pop(trial_id, None)
        return self._record(Interrupted(id=trial_id, reason=reason, seconds=seconds, lane=lane))

    # Rungs

    def _on_rung(self, trial_id: str, rung: int) -> Decision:
        """Decide on a trial that arrives at a rung; its arrival may promote or cut others there, too."""
        if rung in self._trial(trial_id).promoted:
            return GO_ON
        self._judge(self._trial(trial_id).config.rungs.index(rung))
        trial = self._trial(trial_id)
        if trial.state is TrialState.PRUNED:
            return Decision(Action.STOP, trial.cause, trial.reason)
        if rung in trial.promoted:
            return GO_ON
        reason = f"waiting at {rung} samples"
        seconds, lane = self._spending.end(trial_id), self._lanes.pop(trial_id, None)
        self._record(Paused(id=trial_id, rung=rung, reason=reason, seconds=seconds, lane=lane))
        return Decision(Action.PAUSE, Cause.RUNG, reason)

    def _judge_paused(self) -> None:
        """Judge every rung where trials are paused, if anything has happened since the last time."""
        if self._judged_at == self.study.num_events:
            return
        self._judged_at = self.study.num_events
        for level in verdicts.levels_waited_at(self.study, self.context.stage):
            self._judge(level)

    def _judge(self, level: int) -> None:
        """Carry out the verdict on every candidate at its rung of this level."""
        verdict_by_candidate = verdicts.at_rung(
            self.study, self.context.stage, level, self.num_lanes, self.context.config.target_loss
        )
        candidates = self.study.candidates(self.context.stage.type)
        for name, decision in verdict_by_candidate.items():
            for trial in candidates[name]:
                rung = trial.config.rungs[level]
                if not trial.state.ended and rung not in trial.promoted:
                    self._carry_out(trial.id, rung, decision)

    def _carry_out(self, trial_id: str, rung: int, decision: Decision) -> None:
        if decision.action is Action.GO_ON:
            self._record(Promoted(id=trial_id, rung=rung, reason=decision.reason))
        elif decision.action is Action.STOP:
            self._end(trial_id, TrialState.PRUNED, decision.cause, decision.reason)

    # Writing

    def _end(
        self, trial_id: str, state: TrialState, cause: Cause | None, reason: str, metrics: Metrics | None = None
    ) -> None:
        seconds, lane = self._spending.end(trial_id), self._lanes.pop(trial_id, None)
        event = Ended(
            id=trial_id, state=state, cause=cause, reason=reason, metrics=metrics or {}, seconds=seconds, lane=lane
        )
        self._record(event)
        self._steps.pop(trial_id, None)
        if self._measurements:
            self._measurements.remember(self._trial(trial_id))

    def _record(self, event: Event) -> None:
        """Journal the event, then tell the observers, one after the other."""
        self.journal.append(event)
        for observer in self._observers:
            self._tell(observer, event)

    def _tell(self, observer: Observer, event: Event) -> None:
        match event:
            case Started():
                observer.started(self._trial(event.id))
            case Evaluated():
                observer.evaluated(self._trial(event.id), event.metrics)
            case Paused() | Interrupted():
                observer.waits(self._trial(event.id))
            case Ended():
                observer.ended(self._trial(event.id))
            case Noticed():
                trial = None if event.id is None else self._trial(event.id)
                observer.noticed(trial, Notice(event.notice, event.reason))
            case Concluded():
                observer.concluded(self.study.conclusions[event.stage])
            case _:
                pass  # proposals, promotions and the like change nothing that an observer shows

    def _trial(self, trial_id: str) -> Trial:
        return self.study.trials[trial_id]

    def _count(self, *states: TrialState) -> int:
        return self.study.count(self.context.stage.type, *states)
