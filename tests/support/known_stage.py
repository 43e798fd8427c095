"""A stage of a study and what the journal would hold of it, without anything that runs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.findings import Findings, Found, concluded, found_in
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import Concluded, Ended, proposed
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.state import Conclusion, Study
from batchscout.orchestrator.study.trial import Proposal, TrialState
from tests.support.lane_player import study_of


class Known:
    """Trials end when told to, with the metrics told."""

    def __init__(
        self,
        stage: dict[str, Any],
        facts: Facts | None = None,
        study: Study | None = None,
        more_stages: Sequence[dict[str, Any]] = (),
        **changes: Any,
    ) -> None:
        """more_stages: what else the study file asks for."""
        self.config = study_of(stages=[stage, *more_stages], **changes)
        self.study = study or Study("played", facts=facts or Facts())
        keys = self.config.stages[0]
        self.context: StageContext[Any] = StageContext(keys, self.config, self.study)
        self.stage = stage_of(keys)

    def concluded(self, *found: Findings) -> Known:
        for findings in found:
            self.study.apply(Concluded(**asdict(concluded(findings, ""))))
        return self

    def propose(self) -> list[Proposal]:
        return self.stage.propose(self.context)

    def waiting(self) -> list[Proposal]:
        """What is proposed and has not run yet."""
        return [proposal for proposal in self.propose() if proposal.id not in self.study.trials]

    def play(self, end: Callable[[Known, Proposal], None]) -> Known:
        """End the first that waits, and again until none does."""
        for _ in range(1000):
            if not (waiting := self.waiting()):
                return self
            end(self, waiting[0])
        raise AssertionError("the stage never ends")

    def conclude(self) -> Conclusion:
        return self.stage.conclude(self.context)

    def found(self, kind: type[Found]) -> Found:
        """What the stage found, in its own type."""
        findings = found_in(self.conclude(), kind)
        assert findings is not None
        return findings

    def end(
        self, trial_id: str, state: str = "complete", reason: str = "", cause: Cause | None = None, **metrics: Any
    ) -> None:
        """The trial as proposed, ended."""
        wanted = {proposal.id: proposal for proposal in self.propose()}[trial_id]
        self.study.apply(proposed(wanted))
        end = {"state": TrialState(state), "cause": cause, "reason": reason, "metrics": metrics, "seconds": 1.0}
        self.study.apply(Ended(id=trial_id, **end))

    def ids(self) -> list[str]:
        return [proposal.id for proposal in self.propose()]

    def num_rounds(self) -> int:
        """In which something was timed."""
        return max(trial.proposal.round or 0 for trial in self.study.trials.values())


def noisy(share: float, seed: object = "") -> Callable[[Proposal], float]:
    """Every timing is off by as much as this share, the same however often it is asked."""
    return lambda proposal: math.exp(random.Random(f"{seed}{proposal.id}").gauss(0, share))
