"""How much fits, and what is fast?

Every mode gets a search for the largest micro-batch and a ladder of sizes below it. The fastest points are timed again
in turns. The one that is chosen must fit once more in a fresh process, and so must the large ones that will be trained.

    probes (one dynamic compile a mode) -> timings of the finalists (static shapes, in rounds) -> verification
"""

from batchscout.orchestrator.config.stages import Frontier, Train
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.findings import found, winner_of
from batchscout.orchestrator.stages.frontier.checkpointing import notes_on_checkpointing
from batchscout.orchestrator.stages.frontier.conclude import conclude
from batchscout.orchestrator.stages.frontier.figures import figures
from batchscout.orchestrator.stages.frontier.findings import FrontierFindings
from batchscout.orchestrator.stages.frontier.knobs import MOST_PROBES
from batchscout.orchestrator.stages.frontier.modes import knobs_to_try, modes
from batchscout.orchestrator.stages.frontier.probes import smallest_size
from batchscout.orchestrator.stages.frontier.propose import propose
from batchscout.orchestrator.stages.frontier.variants import variants
from batchscout.orchestrator.stages.probing import allowed_in_words
from batchscout.orchestrator.stages.stage import Stage
from batchscout.orchestrator.units import counted, counted_between
from batchscout.trainers.knobs import in_words, that_change_the_loss


def describe(context: StageContext[Frontier]) -> list[str]:
    smallest, raised = smallest_size(context), context.study.facts.alone_raises
    begins_at_two = raised is not None and smallest != context.stage.smallest
    why = f" (of 1 sample the training raises {raised})" if begins_at_two else ""
    beside = ", ".join(variant.name for variant in variants(context))
    return [
        f"modes: {', '.join(str(mode) for mode in modes(context))}",
        *notes_on_checkpointing(context),
        *_knobs(context),
        f"micro-batch {smallest}{why}, then the largest that fits, by prediction and measured peaks, and those between",
        *([f"at the fastest point, also: {beside}"] if beside else []),
        f"{counted(context.stage.finalists, 'finalist')} in {counted(context.stage.rounds, 'round')}; then {_verified(context)}",
        *allowed_in_words(context),
    ]


def _knobs(context: StageContext[Frontier]) -> list[str]:
    """Return which memory knobs are tried, if any is."""
    names = knobs_to_try(context)
    if not names:
        return []
    checked = that_change_the_loss(names)
    runs = f"; a check of the loss in short runs before {in_words(checked)} may be chosen" if checked else ""
    return [f"memory knobs, where memory binds, in at most {MOST_PROBES} probes: {in_words(names)}{runs}"]


def _verified(context: StageContext[Frontier]) -> str:
    """Return what is tried in a fresh process; what does not fit there is followed by one more."""
    if not context.config.keys_of(Train):
        return "the fastest in a fresh process"
    trials = counted_between(1, 1 + len(modes(context)), "trial")
    return f"{trials} in a fresh process: the fastest, each mode's largest"


def _disturbed(context: StageContext[Frontier]) -> tuple[str, ...]:
    findings = found(context.study, FrontierFindings)
    return findings.disturbed if findings else ()


COLUMNS = (
    "tokens_per_second",
    "step_seconds",
    "peak_memory_bytes",
    "peak_allocated_bytes",
    "predicted_memory_bytes",
    "mfu",
    "hfu",
)

STAGE = Stage[Frontier](
    propose,
    conclude,
    describe,
    figures,
    COLUMNS,
    winner=lambda context: winner_of(context.study, FrontierFindings),
    step_seconds_limit=lambda context: context.stage.max_step_seconds,
    fails_by_mode=True,
    reuses_measurements=True,
    disturbed=_disturbed,
)
