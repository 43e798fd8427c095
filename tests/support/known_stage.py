"""A stage of a study and what the journal would hold of it, without anything that runs."""

from __future__ import annotations

from typing import Any

from orchestrator.stages import module_of
from orchestrator.stages.context import Setting
from orchestrator.study.state import Conclusion, Proposal, Study
from tests.support.lane_player import study_of


class Known:
    """Trials end when told to, with the metrics told."""

    def __init__(self, stage: dict[str, Any], facts: dict[str, Any] | None = None, **changes: Any) -> None:
        self.config = study_of(stages=[stage], **changes)
        self.stage, self.setting = self.config.stages[0], Setting(self.config, "/run")
        self.study = Study("played", facts=facts or {})

    def concluded(self, **stages: dict[str, Any]) -> Known:
        for name, values in stages.items():
            self.study.conclusions[name] = Conclusion(name, True, "", values)
        return self

    def propose(self) -> list[Proposal]:
        return module_of(self.stage).propose(self.stage, self.setting, self.study)

    def conclude(self) -> Conclusion:
        return module_of(self.stage).conclude(self.stage, self.setting, self.study)

    def end(self, trial_id: str, state: str = "complete", reason: str = "", **metrics: Any) -> None:
        """The trial as proposed, ended."""
        wanted = {proposal.id: proposal for proposal in self.propose()}[trial_id]
        keys = ("id", "stage", "role", "protected", "fresh", "expected")
        fields = {key: getattr(wanted, key) for key in keys}
        self.study.apply({"kind": "trial", **fields, "config": wanted.config.model_dump(mode="json")})
        end = {"state": state, "reason": reason, "metrics": metrics, "seconds": 1.0}
        self.study.apply({"kind": "ended", "id": trial_id, **end})

    def ids(self) -> list[str]:
        return [proposal.id for proposal in self.propose()]
