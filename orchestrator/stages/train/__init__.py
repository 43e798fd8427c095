"""Which batch ends best at equal cost, each at its own learning rate? Full training runs, asked for one after the other.

The first runs are the baseline's and those of a few batches far apart, at the scaling rule's rates. From then on the
surface over batch and rate says after which run the choice would waste least, until it wastes little or no run is worth its time.

    lineup (which batches, what each may train on) -> propose (run by run) -> choice (by the surface) -> conclude
"""

from __future__ import annotations

from batchscout.orchestrator.config.stages import RUNS_OF_A_FURTHER_LANE, Frontier, Train
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.curves import TRAINING_COLUMNS
from batchscout.orchestrator.stages.findings import winner_of
from batchscout.orchestrator.stages.rates import rates
from batchscout.orchestrator.stages.stage import Stage
from batchscout.orchestrator.stages.train.choice import LIKELY as LIKELY
from batchscout.orchestrator.stages.train.choice import Choice as Choice
from batchscout.orchestrator.stages.train.choice import choice_of as choice_of
from batchscout.orchestrator.stages.train.choice import full_runs as full_runs
from batchscout.orchestrator.stages.train.choice import has_own as has_own
from batchscout.orchestrator.stages.train.choice import not_run as not_run
from batchscout.orchestrator.stages.train.choice import so_far
from batchscout.orchestrator.stages.train.choice import surface_of as surface_of
from batchscout.orchestrator.stages.train.choice import whose as whose
from batchscout.orchestrator.stages.train.conclude import conclude
from batchscout.orchestrator.stages.train.conclude import gain_over as gain_over
from batchscout.orchestrator.stages.train.conclude import interval as interval
from batchscout.orchestrator.stages.train.conclude import train_findings as train_findings
from batchscout.orchestrator.stages.train.figures import figures
from batchscout.orchestrator.stages.train.findings import BatchFindings as BatchFindings
from batchscout.orchestrator.stages.train.findings import LearningRateFindings as LearningRateFindings
from batchscout.orchestrator.stages.train.findings import TimeGain as TimeGain
from batchscout.orchestrator.stages.train.findings import TrainFindings as TrainFindings
from batchscout.orchestrator.stages.train.findings import chosen_run as chosen_run
from batchscout.orchestrator.stages.train.findings import loss_deviation as loss_deviation
from batchscout.orchestrator.stages.train.findings import trained as trained
from batchscout.orchestrator.stages.train.foreseen import foreseen, times_batches
from batchscout.orchestrator.stages.train.lineup import lineup_of as lineup_of
from batchscout.orchestrator.stages.train.outlook import why_it_cannot_win
from batchscout.orchestrator.stages.train.propose import FIRST_RUNS as FIRST_RUNS
from batchscout.orchestrator.stages.train.propose import propose
from batchscout.orchestrator.units import counted, number_text


def describe(context: StageContext[Train]) -> list[str]:
    most = f"{counted(num_full_runs(context), 'run')} at most"
    if context.stage.max_runs is None and not context.config.placement.lanes and times_batches(context.config):
        most += f", and {RUNS_OF_A_FURTHER_LANE} for each further lane"
    if context.config.keys_of(Frontier):
        cost = "samples" if context.config.objective == "samples" else "training time"
        runs = [f"each batch in its fastest form, at equal {cost}; {most}"]
    else:
        candidates = lineup_of(context).candidates
        runs = [f"train-{one.split}  {one.told}, {number_text(one.sample_budget)} samples" for one in candidates]
        runs.append(most)
    return [*runs, *foreseen(context)]


def num_full_runs(context: StageContext[Train]) -> int:
    """Return how many runs it takes at most: one where no stage before times batches, as nothing says then what else to run."""
    return context.stage.most_runs(context.most_lanes) if times_batches(context.config) or rates(context) else 1


STAGE = Stage[Train](
    propose,
    conclude,
    describe,
    figures,
    TRAINING_COLUMNS,
    so_far=so_far,
    winner=lambda context: winner_of(context.study, TrainFindings),
    precedence=2,
    num_full_runs=num_full_runs,
    too_slow_to_win=why_it_cannot_win,
)
