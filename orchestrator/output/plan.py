"""`batchscout plan`: what a study would do, before it costs anything."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from orchestrator.config.keys import StudyConfig
from orchestrator.config.stages import Frontier, StageConfig
from orchestrator.config.trial import base_trial
from orchestrator.stages import frontier, grid, module_of
from orchestrator.stages.context import Setting
from orchestrator.study.state import Study
from orchestrator.units import bytes_text, seconds_text
from trainers.config import TrialConfig
from trainers.peak_memory import PeakMemory


def print_plan(config: StudyConfig, *, predict_memory: bool) -> None:
    """Stages, the trials that are known now, what is skipped and why, and the memory predicted for the frontier."""
    console = Console(highlight=False)
    setting, study = Setting(config, f"runs/{config.name}"), Study(config.name)
    full_runs, frontier_stage = _full_runs(config), config.stage_of(Frontier)
    memory, estimate = None, None
    if predict_memory:  # first: what is wrong with model or data is said before anything else
        with console.status("predicting memory and time"):
            memory = _memory(frontier_stage, setting, study) if frontier_stage else None
            estimate = _estimate(config, full_runs) if full_runs else None
    console.print(Text(f"{config.name}: {len(config.stages)} stages", style="bold"))
    for stage in config.stages:
        console.print(Text(f"\n{stage.type}: {type(stage).__doc__}", style="bold"))
        for line in _lines(stage, setting, study):
            console.print(Text(f"  {line}"))
    if memory:
        console.print(
            Text(
                "\npredicted peak memory in MiB (of eager code, from its shapes; compiled code differs until it is measured)",
                style="bold",
            )
        )
        console.print(memory)
    console.print(Text(f"\nat most {full_runs} full runs of {config.sample_budget:,} samples, beside the short probes"))
    if estimate:
        console.print(Text(estimate))


def _lines(stage: StageConfig, setting: Setting, study: Study) -> list[str]:
    if stage.type == "frontier":
        names = ", ".join(str(mode) for mode in frontier.modes(stage, setting))
        return [
            f"modes: {names}",
            f"micro-batch {stage.smallest}, then the largest that fits, by prediction and measured peaks, and those between",
        ]
    if stage.type == "throughput":
        return [
            f"{len(stage.multiples)} effective batches at most: {', '.join(map(str, stage.multiples))} x the chosen micro-batch"
        ]
    if stage.type == "equivalence" and not stage.micro_batch_sizes and setting.study.stage_of(Frontier):
        return ["the chosen micro-batch against the two largest sizes that divide it, over one effective batch"]
    if stage.type == "learning_rate":
        return [
            f"the rule's learning rate for the winner's batch times {', '.join(f'{m:g}' for m in stage.multipliers)}"
        ]
    if stage.type == "train" and setting.study.stage_of(Frontier):
        return [
            "baseline, largest, second largest, best tokens/s, best goodput and an unscaled contrast, duplicates merged"
        ]
    trials = [f"{found.id}  {found.role}".rstrip() for found in module_of(stage).propose(stage, setting, study)]
    skipped = grid.skipped(stage, setting, study) if stage.type == "grid" else []
    return trials + [f"skipped: {reason}" for reason in skipped]


# What a training step reaches of the rate of large matrix products alone; a guess, and said to be one.
ASSUMED_UTILISATION = 0.5


def _estimate(config: StudyConfig, full_runs: int) -> str:
    """The seconds of the full runs, from FLOPs counted on fake tensors and this machine's rate of matrix products."""
    from trainers.device import pick_device
    from trainers.prediction import flops_per_sample
    from trainers.throughput import matmul_flops_per_second

    trial = base_trial(config, None)
    try:
        flops = flops_per_sample(trial)
    except Exception as error:
        return f"ETA: {_not_predictable(error)}"
    rate = matmul_flops_per_second(pick_device(), trial.precision) * config.world_size
    seconds = full_runs * config.sample_budget * flops / (ASSUMED_UTILISATION * rate)
    return (
        f"ETA: about {seconds_text(seconds)} of training, longer for a small model, if nothing is pruned ({flops:.2g} FLOPs per sample, at "
        f"{ASSUMED_UTILISATION:.0%} of the {rate:.2g} FLOP/s that matrix products reach on {config.world_size} rank(s) of this "
        "machine); start-up, compiling and the probes come on top. batchscout run shows the time left as it is measured"
    )


def _not_predictable(error: Exception) -> str:
    """A user's forward may do what fake tensors cannot, such as reading a value; bad input is raised again."""
    if isinstance(error, ValueError):
        raise error
    return f"not predictable without running it ({type(error).__name__})"


def _full_runs(config: StudyConfig) -> int:
    setting, study = Setting(config, ""), Study(config.name)
    counts = {"train": 6, "learning_rate": 0, "grid": 0}
    for stage in config.stages:
        if stage.type == "learning_rate":
            counts["learning_rate"] = sum(multiplier != 1 for multiplier in stage.multipliers)
        if stage.type == "grid":
            counts["grid"] = len(grid.propose(stage, setting, study))
    wanted = {stage.type for stage in config.stages}
    return len(config.seeds) * sum(count for kind, count in counts.items() if kind in wanted)


def _memory(stage: Frontier, setting: Setting, study: Study) -> Group:
    """One row for eager and compiled alike, then why some are not known; all of it from one process of its own."""
    from trainers.prediction import predict_in_own_process

    limit, free = _limit(setting, study), setting.study.headroom
    sizes = [stage.smallest * factor for factor in (1, 2, 4, 8) if stage.smallest * factor <= stage.largest]
    table = Table(box=None, padding=(0, 0, 0, 2))
    table.add_column("mode", no_wrap=True)
    for size in sizes:
        table.add_column(f"m={size}", justify="right")
    if limit:
        table.add_column(f"largest in\n{bytes_text(limit)}", justify="right")
        table.add_column(f"and {free:.0%}\nleft free", justify="right")
    allowed = [limit, limit * (1 - free)] if limit else []
    rows = _memory_rows(stage, setting, study)
    predicted = dict(zip(rows, predict_in_own_process(list(rows.values())), strict=True))
    if refused := next((found for found in predicted.values() if isinstance(found, ValueError)), None):
        raise refused
    for name, found in predicted.items():
        known = isinstance(found, PeakMemory)
        table.add_row(name, *(_memory_cells(found, sizes, allowed, stage.largest) if known else ["not predictable"]))
    reasons = [f"  {name}: {found}" for name, found in predicted.items() if not isinstance(found, PeakMemory)]
    return Group(table, *map(Text, reasons))


def _limit(setting: Setting, study: Study) -> int | None:
    """The study's, else this machine's GPU; None where the study will take what is free on the host when it runs."""
    from trainers.device import device_bytes, pick_device

    return setting.memory_limit_bytes(study) or device_bytes(pick_device())


def _memory_rows(stage: Frontier, setting: Setting, study: Study) -> dict[str, TrialConfig]:
    """{what the row is called: the trial}. A memory budget keeps less than `none` does, and how much is the compiler's."""
    rows = {}
    for mode in frontier.modes(stage, setting):
        name = f"{replace(mode, compile=True)}{f' {mode.precision}' if len(stage.precision) > 1 else ''}"
        bound = " (<= none)" if isinstance(mode.activation_checkpointing, float) else ""
        rows[name + bound] = setting.short_trial(study, stage.smallest, 2, 1, mode=mode)
    return rows


def _memory_cells(found: PeakMemory, sizes: list[int], allowed: list[float], largest: int) -> list[str]:
    """The peak at each size, then the largest size within each of the limits."""
    fits = [found.largest_micro_batch_size(limit, largest) for limit in allowed]
    return [
        *(_mebibytes(found.bytes_at(size)) for size in sizes),
        *(str(size) if size < largest else f">={size}" for size in fits),
    ]


def _mebibytes(num_bytes: float) -> str:
    mebibytes = num_bytes / 2**20
    return f"{mebibytes:,.0f}" if mebibytes >= 100 else f"{mebibytes:.1f}"
