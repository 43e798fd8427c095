"""Which batches will be compared, as far as that is known before anything has run: memory and speeds are not. Pure."""

from __future__ import annotations

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import Frontier, Throughput, Train
from batchscout.orchestrator.config.trial import baseline_batch
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.too_short import too_short
from batchscout.orchestrator.stages.train.lineup import lineup_of

MOST_LISTED = 8


def foreseen(context: StageContext[Train]) -> list[str]:
    """Return the batches, why others are none of them, and a warning where the user's own is none."""
    if not times_batches(context.config):
        return _of_one_alone(context)
    possible, baseline = _possible(context), baseline_batch(context.config)
    short = [found for batch in possible if batch != baseline and (found := too_short(context.config, batch, 1.0))]
    kept = [batch for batch in possible if batch not in {one.effective_batch_size for one in short}]
    listed = [f"{batch}{' (the baseline)' if batch == baseline else ''}" for batch in kept]
    told = ", ".join(listed if len(listed) <= MOST_LISTED else [*listed[: MOST_LISTED - 1], "...", listed[-1]])
    said = [f"effective batch{'es' if len(kept) > 1 else ''} {told}, or near them, as memory and speeds allow"]
    if short:
        first = short[0]
        said.append(
            f"{first.effective_batch_size}{' and larger' if len(short) > 1 else ''} only if faster than the baseline: at its speed a full run has "
            f"{first.num_steps} optimizer steps of it, and {first.fewest_steps} are the fewest; sample_budget: {first.sample_budget} compares it"
        )
    if baseline not in kept:
        said.append(f"Warning: {_why_not(context, baseline)}")
    return said


def times_batches(config: StudyConfig) -> bool:
    """True if a stage of the study measures how fast batches train."""
    return bool(config.keys_of(Frontier) or config.keys_of(Throughput))


def _of_one_alone(context: StageContext[Train]) -> list[str]:
    (alone,) = {one.split.effective_batch_size for one in lineup_of(context).candidates}
    baseline = baseline_batch(context.config)
    said = [
        f"Warning: effective batch {alone} trains once, at the rule's learning rate, and is compared with nothing here, as no stage before times "
        "batches; add the stages frontier and throughput"
    ]
    if alone != baseline:
        said.append(
            f"Warning: the batch that optimizer.lr is given for ({baseline}) is not run; set batch: {{effective_batch_size: {baseline}}}"
        )
    return said


def _possible(context: StageContext[Train]) -> list[int]:
    """Return the batches that are multiples of the smallest micro-batch by a power of two, up to the largest that the stages before
    try, with the baseline, the smallest first."""
    config, facts = context.config, context.study.facts
    frontier, throughput = config.keys_of(Frontier), config.keys_of(Throughput)
    split = context.given_split()
    smallest = max(frontier.smallest if frontier else split.micro_batch_size, facts.smallest_micro_batch)
    largest = frontier.largest if frontier else split.effective_batch_size // config.world_size
    most = largest * config.world_size * (max(throughput.multiples) if throughput else 1)
    most = min(most, facts.num_train_samples or most)
    doubled = [smallest * config.world_size * 2**i for i in range(most.bit_length())]
    baseline = baseline_batch(config)
    own = {baseline} if baseline % config.world_size == 0 and baseline <= most else set[int]()
    return sorted({batch for batch in doubled if batch <= most} | own)


def _why_not(context: StageContext[Train], baseline: int) -> str:
    config, num_samples = context.config, context.study.facts.num_train_samples
    own = f"your own batch ({baseline}) is not among them"
    if baseline % config.world_size:
        return f"{own}: it is no multiple of world_size ({config.world_size}); change one of them"
    if num_samples is not None and baseline > num_samples:
        return f"{own}: the data has {num_samples:,} training samples"
    return f"{own}: it is larger than what is tried; raise stages.frontier.largest"
