"""Runs one stage without knowing Ray: which trial next, what a message means, what the journal must hold.

The scheduler and the search algorithm of Ray Tune are thin shells around it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from orchestrator.config.stages import AshaPruner, Frontier, KillRules, StageConfig
from orchestrator.decisions import kill_rules, pruners
from orchestrator.decisions.pruners import GO_ON, Decision, Demand, Entrant
from orchestrator.stages import module_of, wants_all_at_once
from orchestrator.stages.context import Setting
from orchestrator.stages.ranking import candidate
from orchestrator.study.journal import Journal
from orchestrator.study.messages import Message
from orchestrator.study.reuse import Measured, Measurements
from orchestrator.study.state import Conclusion, Halted, Proposal, Trial, TrialState

# A stage whose first trials all fail, so many of them, is not at fault with this one or that.
ENOUGH_FAILURES = 3
STOPPED = "stopped:"
# A trial whose machine is lost so often between two evaluations is not run again.
MAX_INTERRUPTIONS = 5
# A rate is judged from here on: compiling and the first steps are behind.
STEPS_BEFORE_RATE_IS_JUDGED = 20


class Listener(Protocol):
    """Who else wants to know (W&B)."""

    def started(self, trial: Trial) -> None: ...
    def result(self, trial_id: str, metrics: dict[str, float]) -> None: ...
    def ended(self, trial: Trial) -> None: ...


class Director:
    """One stage of a study, from its first trial to its conclusion."""

    def __init__(
        self, stage: StageConfig, setting: Setting, journal: Journal, listener: Listener, num_lanes: int,
        is_stopping: Callable[[], bool] = lambda: False, measurements: Measurements | None = None,
    ) -> None:  # fmt: skip
        """measurements: of earlier studies, where those of this stage may stand for them."""
        self.stage, self.setting, self.journal = stage, setting, journal
        self._listener, self.num_lanes, self._is_stopping = listener, num_lanes, is_stopping
        self._measurements = measurements
        self._losses: dict[str, list[float]] = {}
        self._started: dict[str, float] = {}
        self._halted = self._impossible = ""
        self._asked_at = self._judged_at = 0
        """How many records the study had when its proposals, and when those who wait, were last looked at."""
        self._by_candidate: dict[str, list[str]] = {}
        self._by_code: dict[int, dict[tuple[object, ...], list[str]]] = {}
        """The stage's trials by what never changes of them: seeds of one candidate; the effective batch, and the code."""
        self.latest: dict[str, dict[str, float]] = {}
        """The last metrics heard of each running trial, journaled or not, for people to look at."""
        self.on_change: Callable[[Trial], None] = lambda trial: None
        """Called with every trial that starts, pauses or ends."""
        if stage.type not in journal.study.started:
            journal.append("stage", stage=stage.type)
        for trial in journal.study.of_stage(stage.type):
            self._file(trial)

    # What to run

    def next_trial(self, num_held: int = 0) -> Trial | None:
        """The trial to start now, or None: all lanes are busy, or nothing may run before another ends.

        num_held: how many lanes still have a trial that is to run no more. Tune asks between its events: here, and nowhere
        else, Ctrl-C takes effect.
        """
        if self._is_stopping():
            raise KeyboardInterrupt
        self.journal.raise_if_lost()
        if self._halted:
            raise Halted(self._halted)
        if self._count(TrialState.RUNNING) + num_held >= self.num_lanes:
            return None
        self._propose()
        self._judge_paused()
        if self._all_fail():
            return None
        # Whoever is furthest goes first: it is what the others wait for.
        return self.journal.study.furthest(self.stage.type, TrialState.WAITING)

    def finished(self) -> bool:
        """Whether every trial that the stage wants has ended, or would fail as all before it did."""
        self._propose()
        if self._all_fail() and not self._count(TrialState.RUNNING):
            self._give_up()
        return not self._count(TrialState.WAITING, TrialState.RUNNING, TrialState.PAUSED)

    def _all_fail(self) -> bool:
        """Whether enough have failed, and nothing else has happened, to know that the others would, too.

        In one mode a model may fail that runs in another: several must have, and the frontier looks at each of its own.
        """
        if isinstance(self.stage, Frontier) or self._count(TrialState.FAILED) < ENOUGH_FAILURES:
            return False
        if self._count(TrialState.COMPLETE, TrialState.OUT_OF_MEMORY):
            return False
        trials = [trial for trial in self._trials() if not trial.reason.startswith(STOPPED)]
        ended = [trial for trial in trials if trial.state.ended]
        kinds, tried = ({_code(trial) for trial in some} for some in (self._trials(), ended))
        in_vain = all(t.state is TrialState.FAILED for t in ended) and not any(t.history for t in trials)
        return in_vain and len(tried) >= min(ENOUGH_FAILURES, len(kinds))

    def _give_up(self) -> None:
        failed = [trial for trial in self._trials() if trial.state is TrialState.FAILED]
        what = f"all of the first {len(failed)} trials failed, so no more were started"
        self._impossible = f"{what}; {failed[-1].id}: {failed[-1].reason}"
        for trial in self._trials():
            if not trial.state.ended:
                self._end(trial.id, TrialState.PRUNED, f"{STOPPED} {what}")

    def conclude(self) -> None:
        conclusion = self._conclusion()
        self.journal.append(
            "conclusion",
            stage=conclusion.stage,
            ok=conclusion.ok,
            reason=conclusion.reason,
            values=conclusion.values,
            notes=list(conclusion.notes),
        )

    def _conclusion(self) -> Conclusion:
        kind = self.stage.type
        if self._impossible:
            return Conclusion(kind, False, self._impossible)
        try:
            return module_of(self.stage).conclude(self.stage, self.setting, self.journal.study)
        except ValueError as error:
            return Conclusion(kind, False, str(error))

    def proposals(self) -> list[Proposal]:
        """None more where what earlier stages chose cannot be run: the stage ends with that as its result."""
        try:
            return module_of(self.stage).propose(self.stage, self.setting, self.journal.study)
        except ValueError as error:
            self._impossible = str(error)
            return []

    def _propose(self) -> None:
        """Journal what the stage wants by now; what was measured before ends at once, and the stage is asked again."""
        while new := self._new_proposals():
            known = self._measurements.find(new) if self._measurements else {}
            for wanted in new:
                self._add(wanted, known.get(wanted.id))
            if not known:
                return

    def _new_proposals(self) -> list[Proposal]:
        """None where nothing has happened since it was asked that could change what it wants."""
        study = self.journal.study
        if self._asked_at == study.num_records or (self._asked_at and wants_all_at_once(self.stage)):
            return []
        self._asked_at = study.num_records
        return [wanted for wanted in self.proposals() if wanted.id not in study.trials]

    def _add(self, wanted: Proposal, known: Measured | None) -> None:
        config = wanted.config.model_dump(mode="json")
        keys = ("id", "stage", "role", "protected", "fresh", "expected")
        self.journal.append("trial", **{key: getattr(wanted, key) for key in keys}, config=config)
        self._file(self._trial(wanted.id))
        if known is not None:
            self._end(wanted.id, known.state, known.reason, known.metrics)

    def _file(self, trial: Trial) -> None:
        self._by_candidate.setdefault(candidate(trial), []).append(trial.id)
        codes = self._by_code.setdefault(trial.config.effective_batch_size, {})
        codes.setdefault(_code(trial), []).append(trial.id)

    # What happens

    def on_started(self, trial_id: str) -> None:
        self._started[trial_id] = time.monotonic()
        self.journal.append("started", id=trial_id)
        self._listener.started(self._trial(trial_id))
        self.on_change(self._trial(trial_id))

    def on_message(self, trial_id: str, message: Message) -> Decision:
        """Take in what a trial said, journal what must not be lost, and decide what becomes of it."""
        trial = self._trial(trial_id)
        if trial.state.ended:  # the verdict on another seed, or at a rung that it repeats, cut it meanwhile
            return Decision("stop", trial.reason)
        if message.outcome is not None:
            self._on_outcome(trial_id, message)
            return Decision("stop")
        self.latest[trial_id] = message.metrics
        self._hear_losses(trial, message)
        decision = self._judge_running(trial_id, message)
        if message.evaluated:
            values = dict.fromkeys(message.rungs, message.metrics.get("val_loss", math.nan))
            self.journal.append("result", id=trial_id, metrics=message.metrics, rungs=values)
            self._listener.result(trial_id, message.metrics)
        if decision.action == "stop":
            self._end(trial_id, TrialState.PRUNED, decision.reason)
            return decision
        for rung in message.rungs:
            decision = self._judge_at_rung(trial_id, rung)
            if decision.action != "go on":
                return decision
        return GO_ON

    def _hear_losses(self, trial: Trial, message: Message) -> None:
        """Of every step once: a trial that went on from a checkpoint, its lane having died, takes some steps again."""
        losses = self._losses.setdefault(trial.id, [])
        steps = round(message.metrics.get("samples_seen", 0) / trial.config.effective_batch_size)
        del losses[max(0, steps - len(message.step_losses)) :]
        losses.extend(message.step_losses)

    def on_relay_lost(self, trial_id: str, reason: str) -> None:
        """What Tune runs only relays: the trial itself goes on from its last checkpoint."""
        if self._trial(trial_id).state is TrialState.RUNNING:
            self._on_interrupted(trial_id, f"interrupted: {reason}")

    def _on_outcome(self, trial_id: str, message: Message) -> None:
        if message.outcome == "stopped":
            return  # it was told to: its state is journaled already, or it waits to go on
        if message.outcome == "interrupted":
            return self._on_interrupted(trial_id, message.reason)
        if message.outcome in ("no_lane", "no_room"):
            self._halted = message.reason
            return
        state = TrialState(message.outcome)
        if state is TrialState.COMPLETE:
            losses = (*message.step_losses, message.metrics.get("val_loss", 0.0))
            bad_loss = next((loss for loss in losses if not math.isfinite(loss)), None)
            if bad_loss is not None:
                return self._end(trial_id, TrialState.PRUNED, f"diverged: the loss is {bad_loss}", message.metrics)
            probed = self._judge_probe(message)
            if probed.action == "stop":
                return self._end(trial_id, TrialState.PRUNED, probed.reason, message.metrics)
            if "val_loss" in message.metrics:
                self.journal.append("result", id=trial_id, metrics=message.metrics, rungs={})
                self._listener.result(trial_id, message.metrics)
        return self._end(trial_id, state, message.reason, message.metrics)

    def _on_interrupted(self, trial_id: str, reason: str) -> None:
        """It waits; one that comes no further, however often, may be what takes its machines down."""
        times = self._trial(trial_id).interruptions + 1
        if times == MAX_INTERRUPTIONS:
            what = f"failed: its machine was lost {times} times since its last evaluation"
            return self._end(trial_id, TrialState.FAILED, f"{what}; {reason}")
        self.journal.append("interrupted", id=trial_id, reason=reason, seconds=self._held_seconds(trial_id))
        self.on_change(self._trial(trial_id))

    def _end(self, trial_id: str, state: TrialState, reason: str, metrics: dict[str, float] | None = None) -> None:
        fields = {"state": state, "reason": reason, "metrics": metrics or {}, "seconds": self._held_seconds(trial_id)}
        self.journal.append("ended", id=trial_id, **fields)
        self.latest.pop(trial_id, None)
        self._losses.pop(trial_id, None)
        if self._measurements and not self._trial(trial_id).reused:
            self._measurements.remember(self._trial(trial_id))
        self._listener.ended(self._trial(trial_id))
        self.on_change(self._trial(trial_id))

    def _held_seconds(self, trial_id: str) -> float:
        """How long it has held a lane since it was last started; 0 for one that waits."""
        started = self._started.pop(trial_id, None)
        return 0.0 if started is None else time.monotonic() - started

    # What is decided

    def _judge_running(self, trial_id: str, message: Message) -> Decision:
        trial, rules = self._trial(trial_id), self.setting.study.kill
        val_loss = message.metrics.get("val_loss", 0.0)
        if not math.isfinite(val_loss):
            return Decision("stop", f"diverged: the validation loss is {val_loss}")
        if not trial.config.evaluations:  # a measurement of a few steps: only a loss that is no number ends it
            decision = kill_rules.judge_losses(self._losses[trial_id], 0, None, 1, None)
            return decision if decision.action == "stop" else self._judge_probe(message)
        losses, batch = self._losses[trial_id], trial.config.effective_batch_size
        # After a crash of the driver the first losses heard are not those of the start.
        heard_from_start = len(losses) * batch >= message.metrics.get("samples_seen", 0)
        decision = kill_rules.judge_losses(
            losses,
            math.ceil(trial.config.warmup_samples / batch),
            rules.spike_deviations,
            rules.spike_steps,
            rules.above_start_factor if heard_from_start else None,
        )
        if decision.action == "go on" and not trial.protected:
            decision = self._judge_rate(trial, message, rules)
        return decision

    def _judge_probe(self, message: Message) -> Decision:
        if not isinstance(self.stage, Frontier):
            return GO_ON
        return kill_rules.judge_probe(message.metrics, self.stage.max_step_seconds)

    def _judge_rate(self, trial: Trial, message: Message, rules: KillRules) -> Decision:
        rate = message.metrics.get("tokens_per_second")
        samples = message.metrics.get("samples_seen", 0)
        if rate is None or samples < STEPS_BEFORE_RATE_IS_JUDGED * trial.config.effective_batch_size:
            return GO_ON
        codes, code = self._by_code[trial.config.effective_batch_size], _code(trial)
        equals = [self._trial(name) for other, names in codes.items() if other != code for name in names]
        rates = [t.metrics["tokens_per_second"] for t in equals if "tokens_per_second" in t.metrics]
        return kill_rules.judge_throughput(rate, max(rates, default=None), rules.min_relative_throughput)

    def _judge_at_rung(self, trial_id: str, rung: int) -> Decision:
        """The verdict on one arrival; others at the rung may be promoted or cut by it too."""
        if rung in self._trial(trial_id).promoted:
            return GO_ON
        self._apply_verdicts(rung)
        trial = self._trial(trial_id)
        if trial.state is TrialState.PRUNED:
            return Decision("stop", trial.reason)
        if rung in trial.promoted:
            return GO_ON
        fields = {"rung": rung, "reason": f"rung: waiting at {rung} samples", "seconds": self._held_seconds(trial_id)}
        self.journal.append("paused", id=trial_id, **fields)
        self.on_change(self._trial(trial_id))
        return Decision("pause", trial.reason)

    def _judge_paused(self) -> None:
        """Whoever waits at a rung may be decided by what happened since."""
        if self._judged_at == self.journal.study.num_records:
            return
        self._judged_at = self.journal.study.num_records
        paused = self.journal.study.in_state(self.stage.type, TrialState.PAUSED)
        for rung in sorted({min(trial.rungs.keys() - trial.promoted) for trial in paused}):
            self._apply_verdicts(rung)

    def _apply_verdicts(self, rung: int) -> None:
        pruner = getattr(self.stage, "pruner", None)
        if not isinstance(pruner, AshaPruner):
            return
        groups = self._groups()
        verdicts = pruners.judge_rung(
            rung,
            [_entrant(name, group, rung) for name, group in groups.items()],
            pruner.reduction_factor,
            synchronous=pruner.synchronous,
            first=rung == next(iter(groups.values()))[0].config.rungs[0],
            demand=self._demand(),
        )
        for name, decision in verdicts.items():
            for trial in groups[name]:
                self._apply(trial, rung, decision)

    def _demand(self) -> Demand:
        """For a lane that is free, or becomes so with the verdict."""
        waiting = self.journal.study.in_state(self.stage.type, TrialState.WAITING)
        newcomers = sum(not trial.rungs for trial in waiting)
        return Demand(newcomers / self.num_lanes, idle=not waiting)

    def _apply(self, trial: Trial, rung: int, decision: Decision) -> None:
        if trial.state.ended or rung in trial.promoted:
            return
        if decision.action == "go on":
            self.journal.append("promoted", id=trial.id, rung=rung, reason=decision.reason)
        elif decision.action == "stop":
            self._end(trial.id, TrialState.PRUNED, decision.reason)

    def _groups(self) -> dict[str, list[Trial]]:
        return {name: [self._trial(seed) for seed in seeds] for name, seeds in self._by_candidate.items()}

    def _trials(self) -> list[Trial]:
        return self.journal.study.of_stage(self.stage.type)

    def _trial(self, trial_id: str) -> Trial:
        return self.journal.study.trials[trial_id]

    def _count(self, *states: TrialState) -> int:
        return self.journal.study.count(self.stage.type, *states)


def _code(trial: Trial) -> tuple[object, ...]:
    """What decides the speed: trials that share it differ by the machine's noise alone."""
    config = trial.config
    return config.micro_batch_size, config.activation_checkpointing, config.compile, config.precision


def _entrant(name: str, group: list[Trial], rung: int) -> Entrant:
    """A configuration at a rung, its seeds as one; a seed that ended before makes it the worst of those there.

    It stays there when it is cut: how many go on must not depend on when that is seen.
    """
    out = all(trial.state.ended for trial in group)
    values = {trial.id: _value_at(trial, rung) for trial in group}
    if not out or any(value is not None for value in values.values()):
        values |= {t.id: math.nan for t in group if t.state.ended and values[t.id] is None}
    return Entrant(
        name,
        pruners.mean_of_seeds(values),
        out=out,
        protected=any(trial.protected for trial in group),
        promoted=all(rung in trial.promoted for trial in group),
    )


def _value_at(trial: Trial, rung: int) -> float | None:
    """Its objective there; a step that crosses several rungs stands at the lowest that it was not let past."""
    return trial.rungs.get(rung) if all(lower in trial.promoted for lower in trial.rungs if lower < rung) else None
