"""`batchscout.load`: a study as its run directory has it, for Python. Loads neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.output.answer import how_to_resume
from batchscout.orchestrator.output.recommendation import Recommendation, recommend
from batchscout.orchestrator.output.trial_rows import trial_row
from batchscout.orchestrator.study.journal import replay
from batchscout.orchestrator.study.run_directory import load_stored_study
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.storage.place import on_this_machine, refuse_file, run_place_of
from batchscout.orchestrator.study.trial import Trial
from batchscout.orchestrator.units import counted
from batchscout.trainers.files import is_there, quoted

if TYPE_CHECKING:
    import pandas

    from batchscout.orchestrator.output.explained import Explanation
    from batchscout.orchestrator.output.report.gallery import Picture


@dataclass(frozen=True, repr=False)
class LoadedStudy:
    """What a run directory holds. `print(study)` says its answer."""

    run_dir: Path
    config: StudyConfig
    replayed: Study

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def is_over(self) -> bool:
        """True if every stage is concluded, or one of them ended the study."""
        return self.replayed.is_over(self.config.stages)

    @cached_property
    def recommendation(self) -> Recommendation | None:
        """What to train with; None where no stage has trained, or not yet."""
        return recommend(self.config, self.replayed)

    @property
    def conclusions(self) -> dict[str, str]:
        """What each stage has found, in a sentence."""
        return {stage: conclusion.reason for stage, conclusion in self.replayed.conclusions.items()}

    @property
    def verdict(self) -> str:
        """The answer: that of the whole study, or of each stage where none has trained."""
        if self.recommendation is not None:
            return self.recommendation.verdict
        return "\n".join(f"{stage}: {reason}" for stage, reason in self.conclusions.items()) or "no stage has ended yet"

    @property
    def report(self) -> Path:
        """The report, which opens in a browser."""
        return self.run_dir / "report.html"

    @property
    def best(self) -> Trial | None:
        """The run that the recommendation rests on; None where there is none yet. Its settings are the recommended ones unless `real_run` carries
        these to another length: then it is the run nearest to them."""
        return self.trial(self.recommendation.evidence.trial) if self.recommendation else None

    def trial(self, id: str) -> Trial:
        """Return a trial by its id: its state and reason, config, metrics, history and rungs. Raises ValueError, with the nearest ids, where
        there is none."""
        if id in self.replayed.trials:
            return self.replayed.trials[id]
        from batchscout.orchestrator.output.explained import no_such_trial

        raise ValueError(no_such_trial(self.run_dir, id, list(self.replayed.trials)))

    def explain(self, id: str) -> Explanation:
        """Return why a trial ran, what was decided with it, its result and its cost; `print` shows it. Raises ValueError as `trial`."""
        from batchscout.orchestrator.output.explained import explain_trial

        return explain_trial(self.run_dir, self.config, self.replayed, self.recommendation, id)

    def export(self, to: str | None = None) -> str:
        """Return the recommendation as another trainer's configuration: torch, hf, accelerate, ..., as of `batchscout export --to`; None: of the
        library that the study's model comes from. Raises ValueError, with all of them, for another, and where nothing is recommended."""
        from batchscout.orchestrator.output.exports import export, first_trainer

        if self.recommendation is None:
            raise ValueError(no_recommendation(self.config, self.replayed, quoted(self.run_dir)))
        to = first_trainer(self.config, self.replayed.facts.own_run) if to is None else to
        return export(self.recommendation, to, quoted(self.run_dir))

    def trials(self) -> pandas.DataFrame:
        """Return a row for each trial: its stage, state and reason, its split and learning rate, and its last metrics."""
        import pandas

        return pandas.DataFrame([trial_row(trial) for trial in self.replayed.trials.values()])

    def figures(self) -> Mapping[str, Picture]:
        """Return the figures of the report by their names, such as "surface" or "timeline"; a notebook shows each, and `save` writes it. One of
        a name that several stages have is named with its stage. A name that there is not raises KeyError, with those that there are."""
        from batchscout.orchestrator.output.report.gallery import Figures, all_figures
        from batchscout.orchestrator.output.report.training import read_curves

        winner = self.recommendation.evidence.trial if self.recommendation else None
        curves = read_curves(self.run_dir, self.replayed, winner)
        return Figures(all_figures(self.config, self.replayed, curves))

    def __str__(self) -> str:
        answer = self.recommendation.answer if self.recommendation else None
        return answer.text(quoted(self.run_dir)) if answer else self.verdict

    def __repr__(self) -> str:
        return f"<study {self.name} in {quoted(self.run_dir)}: {counted(len(self.replayed.trials), 'trial')}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the answer, and with what to train."""
        from batchscout.orchestrator.output.report.answer import short_answer

        return short_answer(self.name, self.verdict, self.recommendation)


def load(run_dir: str | Path) -> LoadedStudy:
    """Return the study that a run directory holds; it may be running. Raises ValueError where there is none."""
    where = on_this_machine(run_place_of(str(run_dir)), "batchscout.load")
    refuse_file(where)
    path = where / "study.yaml"
    for needed in (path, where / "journal.jsonl"):
        if not is_there(needed):
            raise ValueError(
                f"{quoted(where)} holds no study (no {needed.name} in it); check the path, or start one: batchscout run"
            )
    config = load_stored_study(path)
    return LoadedStudy(where.absolute(), config, replay(where / "journal.jsonl", config.name))


def no_recommendation(config: StudyConfig, study: Study, run_dir: str) -> str:
    """Return what to say to whoever would have it. run_dir: as its user types it."""
    if study.is_over(config.stages):
        return f"{run_dir} has no recommendation: its stages ended without one; batchscout status {run_dir} says why"
    return f"{run_dir} has no recommendation yet; finish the study first: {how_to_resume(config, study, run_dir)}"
