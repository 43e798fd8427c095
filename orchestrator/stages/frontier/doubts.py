"""What makes the frontier's answer less sure: modes and samples that were left out, and a machine that was busy."""

from __future__ import annotations

from batchscout.orchestrator.stages.frontier.measured import rate_of
from batchscout.orchestrator.stages.frontier.modes import modes
from batchscout.orchestrator.stages.frontier.progress import FrontierProgress
from batchscout.orchestrator.stages.frontier.variants import variants
from batchscout.orchestrator.study.trial import Trial
from batchscout.orchestrator.units import rate_text


def notes_on_what_was_left_out(known: FrontierProgress) -> list[str]:
    """Return what was left out because the stage may take only so long, or so many samples."""
    notes = [
        f"{mode}: micro-batch {', '.join(map(str, sizes))} {'was' if len(sizes) == 1 else 'were'} left out: {known.probes.allowed}"
        for mode in modes(known.context)
        if (sizes := known.probes.left_out(mode))
    ]
    usable = known.finalists.usable(known.finalists.fitting())
    num_wanted = min(known.context.stage.finalists, len(usable)) + len(variants(known.context))
    if usable and len(known.finalists.points) < num_wanted:
        timed = (
            f"{len(known.finalists.points)} of {num_wanted} finalists were"
            if known.finalists.num_rounds
            else "no finalist was"
        )
        notes.append(f"{timed} timed in turns: {known.probes.allowed}")
    return notes


def notes_on_the_machine(known: FrontierProgress) -> list[str]:
    """Return the signs that something else had the machine."""
    notes = [
        f"{trial.id} reached {rate_text(rate_of(trial), known.context.study.facts.rate_unit)}, and the probe of the same point far more"
        for trial in known.finalists.slower_when_verified
    ]
    if known.finalists.timed and known.finalists.timed.busy:
        notes.append(f"the finalists' timings: {known.finalists.timed.unrest()}")
    notes += [f"{trial.id}: {why}" for trial, why in _disturbed(known)[:1]]
    if not notes:
        return []
    return [f"the machine was busy: {'; '.join(notes)}. Such figures are not kept for later studies"]


def disturbed_trials(known: FrontierProgress) -> tuple[str, ...]:
    """Return the trials whose speed says little of another day, in the order they were proposed."""
    disturbed = [trial for trial, _ in _disturbed(known)]
    suspect = {trial.id for trial in [*known.finalists.slower_when_verified, *_timings_in_doubt(known), *disturbed]}
    return tuple(trial.id for trial in known.trials.all() if trial.id in suspect)


def _disturbed(known: FrontierProgress) -> list[tuple[Trial, str]]:
    """Return the trials during which something else was at work, and what."""
    found = [(trial, known.context.disturbance(trial.metrics)) for trial in known.trials.all()]
    return [(trial, why) for trial, why in found if why]


def _timings_in_doubt(known: FrontierProgress) -> list[Trial]:
    """Return the timings of a machine that was not quiet: those of one round cannot be compared without the others."""
    if known.finalists.timed is None or not known.finalists.timed.busy:
        return []
    return [trial for trial in known.trials.all() if trial.proposal.round is not None]
