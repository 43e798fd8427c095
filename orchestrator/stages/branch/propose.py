"""The runs of the branch stage: the chosen run once more to the last point, the branches from it, and the ramps."""

from __future__ import annotations

from dataclasses import replace

from batchscout.orchestrator.config.mode import mode_of
from batchscout.orchestrator.config.stages import Branch, RampKind
from batchscout.orchestrator.stages.branch.critical import growth, points_of
from batchscout.orchestrator.stages.branch.ramps import equal_cost_budget, phases_of
from batchscout.orchestrator.stages.branch.source import Source, rescaled_rate, source_of
from batchscout.orchestrator.stages.candidates import Candidate, seeded
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.study.trial import Proposal, TrialState
from batchscout.trainers.config import BranchPoint, Phase

EVALUATIONS = 4
"""Of each branch, at even distances."""


def propose(context: StageContext[Branch]) -> list[Proposal]:
    """Return the trunks; the branches of those that have completed; and the ramps once all branches have ended, if the
    critical batch grew."""
    source = source_of(context)
    if len(source.multiples) < 2 or not source.points:
        return []
    trunks = _trunks(context, source)
    branches = [one for point in source.points for one in _branches(context, source, point, trunks)]
    completed = {trial.id for trial in context.trials() if trial.state is TrialState.COMPLETE}
    wanted = [one for one in branches if _trunk_of(trunks, one.config.seed).id in completed]
    return [*trunks, *wanted, *(_ramps(context, source) if context.have_ended([*trunks, *wanted]) else [])]


def _trunks(context: StageContext[Branch], source: Source) -> list[Proposal]:
    """Return the chosen run again, once for each seed, up to the last point and no further.

    It is run again because it was not known to be the chosen one when it ran: to keep checkpoints of every run would fill
    the disk. Before its learning rate falls, a run at a constant rate is the same run.
    """
    changes = {"evaluations": (), "kept_checkpoints": source.points}
    return _at_constant_rate(
        context, source, "branch-trunk", "trunk", 1, source.points[-1] + source.effective_batch_size, changes
    )


def _branches(context: StageContext[Branch], source: Source, point: int, trunks: list[Proposal]) -> list[Proposal]:
    """Return the branches from one point, one for each multiple and seed."""
    end = point + source.num_samples
    evaluations = tuple(point + source.num_samples * i // EVALUATIONS for i in range(1, EVALUATIONS + 1))
    proposals = [
        proposal
        for multiple in source.multiples
        for proposal in _at_constant_rate(
            context, source, branch_name(point, multiple), f"{multiple} x", multiple, end, {"evaluations": evaluations}
        )
    ]
    return [_beginning(proposal, _trunk_of(trunks, proposal.config.seed), point) for proposal in proposals]


def branch_name(point: int, multiple: int) -> str:
    """Return the candidate that the branches from a point with a multiple of the batch are seeds of."""
    return f"branch-at{point}-x{multiple}"


def _beginning(proposal: Proposal, trunk: Proposal, point: int) -> Proposal:
    begin = BranchPoint(directory=f"../{trunk.id}", samples=point)  # so that a run directory may be moved
    return replace(proposal, config=proposal.config.model_copy(update={"branch_from": begin}))


def _at_constant_rate(
    context: StageContext[Branch],
    source: Source,
    name: str,
    role: str,
    multiple: int,
    sample_budget: int,
    changes: dict[str, object],
) -> list[Proposal]:
    """Return runs at a multiple of the chosen batch, as the chosen run is before its learning rate falls."""
    split, chosen = source.split(multiple), source.trial.config
    return seeded(
        context,
        name,
        Candidate(role, split, mode_of(chosen), sample_budget, source.samples_per_second),
        learning_rate=rescaled_rate(context, source, split.effective_batch_size),
        warmup_samples=chosen.warmup_samples,
        schedule={"type": "constant"},
        **changes,
    )


def _trunk_of(trunks: list[Proposal], seed: int) -> Proposal:
    return next(trunk for trunk in trunks if trunk.config.seed == seed)


def _ramps(context: StageContext[Branch], source: Source) -> list[Proposal]:
    """Return the ramps that the study file asks for, where the critical batch grew; of two that are the same, one."""
    points = points_of(context, source)
    if growth(points) != "grew":
        return []
    phases: dict[tuple[Phase, ...], RampKind] = {}
    for kind in context.stage.ramps:
        phases.setdefault(phases_of(context, source, points, kind), kind)
    return [one for ramp, kind in phases.items() for one in _ramp(context, source, kind, ramp)]


def _ramp(context: StageContext[Branch], source: Source, kind: RampKind, phases: tuple[Phase, ...]) -> list[Proposal]:
    chosen = source.trial.config
    budget = equal_cost_budget(context, source, phases)
    return seeded(
        context,
        ramp_name(kind),
        Candidate(f"{kind} ramp", chosen.split, mode_of(chosen), budget, source.samples_per_second),
        learning_rate=chosen.learning_rate,
        warmup_samples=chosen.warmup_samples,
        ramp=phases,
    )


def ramp_name(kind: RampKind) -> str:
    """Return the candidate that the runs of a ramp are seeds of."""
    return f"branch-{kind}"
