"""`batchscout plan`: tells what a study would do, before it costs anything."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Group
from rich.table import Table

from batchscout.orchestrator.config.keys import StudyConfig, given_batch
from batchscout.orchestrator.config.recipe import given_of, left_open_text
from batchscout.orchestrator.config.stages import FEWEST_STEPS, Frontier
from batchscout.orchestrator.config.trial import base_trial, baseline_batch
from batchscout.orchestrator.output.shown import Terminal, shown
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.cost import Cost, cost_of, pays_from, samples_per_second
from batchscout.orchestrator.stages.frontier.modes import modes, modes_with_knobs
from batchscout.orchestrator.stages.frontier.probes import smallest_size
from batchscout.orchestrator.stages.frontier.too_small import check_fits
from batchscout.orchestrator.stages.frontier.trials import ACCUMULATED
from batchscout.orchestrator.stages.frontier.unpredicted import unpredicted_texts
from batchscout.orchestrator.stages.probing import num_full_runs
from batchscout.orchestrator.stages.train.foreseen import times_batches
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.units import bytes_text, counted, training_time_text
from batchscout.trainers.before.peak_memory import PeakMemory
from batchscout.trainers.config import TrialConfig


@dataclass(frozen=True)
class Predicted:
    """What a plan says beyond what the study file does."""

    memory: Group | None
    """A table with the frontier's modes; None without a frontier."""
    cost: list[str]


def predict(config: StudyConfig, facts: Facts) -> Predicted:
    """Predict memory and time. facts: what is known of model and data. Raises ValueError for a fault in these."""
    study, frontier = Study(config.name, facts=facts), config.keys_of(Frontier)
    memory = _memory(StageContext[Frontier](frontier, config, study)) if frontier else None
    return Predicted(memory, estimate(config, facts, num_full_runs(config, study)))


def print_plan(
    config: StudyConfig, facts: Facts, predicted: Predicted | None = None, beyond: str | None = None
) -> None:
    """Print the stages, the trials known by now, what is skipped and why, and what is predicted, on about one screen. facts: what is
    known of model and data. beyond: how the study's memory limit is more than this machine has, so that it is another's."""
    console = Terminal()
    study, lanes = Study(config.name, facts=facts), config.placement.lanes or 1
    full_runs, told = num_full_runs(config, study), predicted.cost if predicted else []
    console.print(shown(f"{config.name}: {counted(len(config.stages), 'stage')}", style="bold"))
    for keys in config.stages:
        console.print(shown(f"{keys.type}: {type(keys).__doc__}", style="bold"))
        for line in stage_of(keys).describe(StageContext(keys, config, study, lanes)):
            console.print_indented(line)
    for line in filter(None, [left_open_text(config, given_of(config)), _micro_batches(config, facts)]):
        console.print(shown(line))
    if predicted and predicted.memory:
        console.print(shown(_MEMORY_TITLE, style="bold"))
        console.print(predicted.memory)
    if full_runs and not any(line.startswith("cost: at most") for line in told):
        samples = f"{config.sample_budget:,} samples"
        each = samples if config.objective == "samples" else f"the time in which the baseline takes {samples}"
        console.print(shown(f"at most {counted(full_runs, 'full run')} of {each}, beside the short probes"))
    if beyond:
        console.print(
            shown(
                f"{beyond}: so this is a prediction for another machine, as it cannot run on this one. The sizes are those of a CPU's kernels; a GPU's "
                "libraries and the rounding of its allocator take somewhat more, compiled code less or more; the time below is this machine's"
            )
        )
    budget = config.budget and f"at most {config.budget.device_hours:g} device-hours in all (budget.device_hours)"
    for line in filter(None, [budget, _placement(config), *told]):
        console.print(shown(line))


def _micro_batches(config: StudyConfig, facts: Facts) -> str | None:
    """Return how many tokens a micro-batch holds; None where it has a number of samples."""
    if config.micro_batch is None:
        return None
    tokens, longest = config.micro_batch.tokens, facts.longest_sample
    samples = "the longest sample" if longest is None else f"the longest sample ({longest:,} tokens)"
    most = (
        ""
        if tokens == "auto" or longest is None
        else f"; at most {tokens:,} tokens, so m is at most {tokens // longest}"
    )
    return (
        f"micro-batches are cut by tokens: below, one of size m holds as many tokens, with its padding, as m x {samples}{most}. A step takes the "
        "same samples as without, in at most as many micro-batches"
    )


_PLACED = {
    "pack": "on one node where it has room for them, else on as few as have",
    "spread": "spread over the cluster's nodes",
    "strict_pack": "on one node",
}


def _placement(config: StudyConfig) -> str:
    """Return where the ranks of a trial are to run, as far as the study file says it; empty if it leaves no choice."""
    said, placement = [], config.placement
    if config.world_size > 1:
        said.append(f"the {config.world_size} ranks of a trial run {_PLACED[placement.strategy]} (placement.strategy)")
    if placement.device is not None:
        said.append(f"trials run on {placement.device} alone (placement.device)")
    return "; ".join(said)


MOST_ROWS = 6
"""Of the table: each kind of activation checkpointing, and again with a memory knob. The report has all that are measured."""
_MEMORY_TITLE = "predicted peak memory in MiB (of eager code; compiled code differs until it is measured)"


# The share of the FLOP/s of large matrix products that a training step reaches. A guess, and the text says so.
ASSUMED_UTILISATION = 0.5
# A study that costs more than so many of the runs that it is for is warned of.
MANY_RUNS = 3
# What a study may save of a run's time is not known before it; these are examples.
EXAMPLES = {"half of their time": 0.5, "a tenth": 0.9}


def estimate(config: StudyConfig, facts: Facts, full_runs: int) -> list[str]:
    """Return what the study costs as one total, for which length of run that pays, and whether it is too much."""
    if not full_runs:
        return []
    if facts.pass_seconds is not None:
        rate, why = samples_per_second(config, facts.pass_seconds), "estimated from timed passes"
    else:
        from batchscout.trainers.speed.flops import NotCountable

        try:
            rate, why = _predicted_rate(config)
        except ValueError:  # bad input
            raise
        except Exception as error:  # fake tensors could not follow the user's forward: only a run can tell
            why = error if isinstance(error, NotCountable) else type(error).__name__
            return [f"cost: not predictable without running it ({why})"]
    lanes = _num_lanes(config)
    cost = cost_of(config, facts, rate, lanes)
    return [
        f"cost: {_cost_text(cost, lanes)}, {why}; loading data, the optimizer, evaluations and compiling come on top",
        *_payback(config, cost, rate),
        *_few_steps(config),
    ]


def _num_lanes(config: StudyConfig) -> int:
    """Return how many lanes this machine has for the study: one where it has no GPU, and no number is asked for."""
    import torch

    return config.placement.lanes or max(1, torch.cuda.device_count() // config.world_size)


def _cost_text(cost: Cost, lanes: int) -> str:
    wall = f" on one lane, {training_time_text(cost.total / lanes)} on {lanes} lanes" if lanes > 1 else ""
    probing = sum(cost.probes.values())
    probes = f", and {training_time_text(probing)} of probes" if probing else ""
    return (
        f"at most {training_time_text(cost.total)}{wall}: {counted(cost.num_full_runs, 'full run')} of "
        f"{training_time_text(cost.run)}{probes}"
    )


def _payback(config: StudyConfig, cost: Cost, rate: float) -> list[str]:
    """Return from which length of run on the study pays, and a warning where it costs far more than the run that it is for."""
    lengths = [
        f"{training_time_text(pays_from(cost.total, share))} if it saves {name}" for name, share in EXAMPLES.items()
    ]
    said = [f"worth it for runs longer than {', '.join(lengths)}"]
    samples = config.real_run.samples if config.real_run else config.sample_budget
    if cost.total > MANY_RUNS * samples / rate:
        which = "real_run.samples" if config.real_run else "sample_budget"
        said.append(
            f"Warning: that is {cost.total * rate / samples:,.0f} times the run of {samples:,} samples ({which}, {training_time_text(samples / rate)}): "
            "worth it only if you repeat that run or train longer (real_run.samples); else lower stages.train.max_runs or budget.device_hours"
        )
    return said


def _few_steps(config: StudyConfig) -> list[str]:
    """Return a warning where the baseline's run has fewer steps than a comparison needs."""
    alone = given_batch(config.batch, config.world_size).effective_batch_size
    batch = baseline_batch(config) if times_batches(config) else alone
    steps = config.sample_budget // batch
    if steps >= FEWEST_STEPS:
        return []
    return [
        f"Warning: a full run of the baseline (effective batch {batch}) has {counted(steps, 'optimizer step')}, and after fewer than {FEWEST_STEPS} "
        f"a loss says little of a batch; set sample_budget to {FEWEST_STEPS * batch:,} or more"
    ]


def _predicted_rate(config: StudyConfig) -> tuple[float, str]:
    """Return (the samples/s, how they are known), from FLOPs counted on fake tensors and this machine's rate of them."""
    from batchscout.trainers.device.device import pick_device
    from batchscout.trainers.device.device_peak import matmul_flops_per_second
    from batchscout.trainers.speed.flops import flops_per_sample

    trial = base_trial(config, None)
    flops = flops_per_sample(trial)
    peak = matmul_flops_per_second(pick_device(), trial.precision) * config.world_size
    return ASSUMED_UTILISATION * peak / flops, (
        f"by {flops:.2g} FLOPs per sample, at {ASSUMED_UTILISATION:.0%} of the {peak:.2g} FLOP/s that matrix products reach here; longer for a "
        "small model"
    )


def _memory(context: StageContext[Frontier]) -> Group:
    """Return a table with one row for each mode, compiled or not, and below it why some modes are not predictable."""
    from batchscout.trainers.before.prediction import NotPredictable, predict_in_own_process
    from batchscout.trainers.device.device import device_bytes, pick_device

    stage = context.stage
    sizes = [size for factor in (1, 2, 4, 8) if (size := smallest_size(context) * factor) <= stage.largest]
    rows = _memory_rows(context)
    predicted = dict(zip(rows, predict_in_own_process(list(rows.values())), strict=True))
    if refused := next((found for found in predicted.values() if isinstance(found, ValueError)), None):
        raise refused
    peaks = [found for found in predicted.values() if isinstance(found, PeakMemory)]
    if len(peaks) == len(predicted):
        check_fits(context.config, peaks, smallest_size(context))
    # On a CPU host without a limit the memory that is free counts at the start.
    limit, free = context.limit_bytes() or device_bytes(pick_device()), context.config.headroom
    allowed = [limit, limit * (1 - free)] if limit else []
    table = _memory_table(sizes, limit, free)
    for name, found in list(predicted.items())[:MOST_ROWS]:
        known = isinstance(found, PeakMemory)
        table.add_row(name, *(_memory_cells(found, sizes, allowed, stage.largest) if known else ["not predictable"]))
    unknown = {name: found.why for name, found in predicted.items() if isinstance(found, NotPredictable)}
    left_out = len(predicted) - MOST_ROWS
    more = [f"  and {counted(left_out, 'mode')} more, with memory knobs"] if left_out > 0 else []
    return Group(table, *map(shown, [*more, *unpredicted_texts(unknown, len(predicted))]))


def _memory_table(sizes: list[int], limit: int | None, free: float) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 2))
    table.add_column("mode", no_wrap=True)
    for size in sizes:
        table.add_column(f"m={size}", justify="right")
    if limit:
        table.add_column(f"largest in\n{bytes_text(limit)}", justify="right")
        table.add_column(f"and {free:.0%}\nleft free", justify="right")
    return table


def _memory_rows(context: StageContext[Frontier]) -> dict[str, TrialConfig]:
    """Return the trial that is predicted for each row, by the row's name.

    A memory budget is predicted as `none`, which needs at least as much: how much a budget saves is up to the compiler.
    """
    stage = context.stage
    rows = {}
    for mode in [*modes(context), *modes_with_knobs(context)]:
        name = f"{replace(mode, compile=True)}{f' {mode.precision}' if len(stage.precision) > 1 else ''}"
        bound = " (<= none)" if isinstance(mode.activation_checkpointing, float) else ""
        rows[name + bound] = context.short_trial(context.split(smallest_size(context), ACCUMULATED), mode, steps=1)
    return rows


def _memory_cells(found: PeakMemory, sizes: list[int], allowed: list[float], largest: int) -> list[str]:
    """Return the peak at each size, then the largest size within each of the limits."""
    fits = [found.largest_micro_batch_size(limit, largest) for limit in allowed]
    return [
        *(_mebibytes(found.bytes_at(size)) for size in sizes),
        *(str(size) if size < largest else f">={size}" for size in fits),
    ]


def _mebibytes(num_bytes: float) -> str:
    mebibytes = num_bytes / 2**20
    return f"{mebibytes:,.0f}" if mebibytes >= 100 else f"{mebibytes:.1f}"
