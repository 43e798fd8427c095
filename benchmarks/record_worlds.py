"""Record the worlds in which the decision code is judged: real training runs over batch, learning rate, seed and budget.

    python benchmarks/record_worlds.py [NAME ...] [--wikitext DIR] [--threads N]

Each world is a tiny model, trained on the CPU and judged on held-out samples, whose runs have the product's warm-up and
schedule, and apart from one world its default optimizer:

    noisy_regression  a network of 3 layers on labels that are mostly noise: large batches pay
    sgd_momentum      a convolutional network on images of noisy gratings, by SGD with momentum
    vit_images        a vision transformer on such images
    sequences         a transformer that sorts 2 to 8 digits; only the sorted ones are targets, so samples differ in length
    gpt_stdlib        a byte-level GPT on the source of Python's standard library
    gpt_wikitext2     a GPT over byte pairs on WikiText-2
    gpt_finetuned     the byte-level GPT, trained on the library's source, goes on with a few samples of English

All learning rates and seeds of a batch are trained at once (ensemble.py). A seed decides the initial weights and the order
of the samples. The warm-up of a batch is 30 steps (10 in finetuning), or a fifth of its shortest budget: since it does not
depend on the budget, all budgets share one trunk of which each anneals a copy. Where the best learning rate of a budget lies at the
edge, two more are recorded beyond it.

A batch is appended to worlds/NAME.jsonl when all its runs are done, and what stands there is not recorded again: to record
anew, remove the file. NAME.OPTION records the same grid with another rule for one of AdamW's settings, with another warm-up, or with Muon,
to worlds/options/, and prints it beside the world. world_table.py says what the files hold. A world takes one to three minutes of a core.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ensemble import ADAMW, AdamW, Ensemble, Muon, Sgd, Shapes, ensemble
from torch import Generator, Tensor
from world_table import World, load
from world_tasks import (
    Samples,
    Task,
    gpt_stdlib,
    gpt_topics,
    gpt_wikitext2,
    initial_weights,
    noisy_regression,
    sequences,
    sgd_momentum,
    vit_images,
)

from batchscout.orchestrator.config.keys import StudyOptimizer
from batchscout.orchestrator.config.trial import optimizer_at
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.step.learning_rate import learning_rate_of_step

WORLDS = Path(__file__).parent / "worlds"
POINTS = 8
"""Every run is evaluated so many times, at equal distances."""
MIN_STEPS = 40
"""The fewest optimizer steps of a recorded run."""
WARMUP_STEPS = 30
WITH_MUON = ("gpt_stdlib", "gpt_wikitext2", "vit_images")
"""The worlds of transformers that begin untrained: Muon is for the matrices of their blocks."""
WARMUPS = (0, 100)
"""The other warm-ups that are recorded, in steps; of each at most a fifth of the shortest budget."""
DECAY_START = 0.8
"""The share of the budget after which the learning rate falls, as in the product's default schedule."""
STEP = 2.0
"""The ratio of neighbouring learning rates."""
EXTENSIONS = 3
"""How often a grid is made wider where a best rate lies at its edge."""


@dataclass(frozen=True)
class Pretraining:
    """The run whose last weights all runs of a world begin with."""

    task: Callable[..., Task]
    batch: int
    learning_rate: float
    sample_budget: int


@dataclass(frozen=True)
class Recipe:
    """What a world is made of."""

    task: Callable[..., Task]
    centres: Mapping[int, float]
    """{effective batch size: the middle of its learning rates}"""
    optimizer: AdamW | Sgd = ADAMW
    weight_decay: float = 0.1
    """Where there are no settings."""
    max_budget: int = 16384
    num_horizons: int = 6
    num_seeds: int = 3
    num_rates: int = 7
    warmup_steps: int = WARMUP_STEPS
    passes: int = 1
    """How often the longest run meets every sample."""
    begins_with: Pretraining | None = None
    settings: StudyOptimizer | None = None
    """The settings of AdamW or Muon, and what of them follows the batch, as a study file would say it. None: the same at every
    batch."""

    def horizons(self, batch: int) -> list[int]:
        """Return the sample budgets that hold enough steps of a batch, each twice the one before."""
        budgets = [self.max_budget >> halved for halved in reversed(range(self.num_horizons))]
        return [budget for budget in budgets if budget >= MIN_STEPS * batch]

    def rates(self, batch: int) -> list[float]:
        half = self.num_rates // 2
        return [self.centres[batch] * STEP**place for place in range(-half, half + 1)]


def by_base(base: float, exponents: Mapping[int, int]) -> dict[int, float]:
    """Return {batch: base x 2 ** exponent}: the rates of all batches are then of one ladder."""
    return {batch: base * 2.0**exponent for batch, exponent in exponents.items()}


def without(centres: Mapping[int, float], batch: int) -> dict[int, float]:
    return {other: centre for other, centre in centres.items() if other != batch}


def defaults(reference_batch_size: int, lr: float, weight_decay: float = 0.1) -> StudyOptimizer:
    """Return the product's settings. lr: the best one at the reference batch and the longest budget."""
    return StudyOptimizer(lr=lr, reference_batch_size=reference_batch_size, weight_decay=weight_decay)


RECIPES: dict[str, Recipe] = {
    "noisy_regression": Recipe(
        noisy_regression,
        by_base(0.001, {4: 1, 16: 2, 64: 3, 128: 3, 256: 4}),
        settings=defaults(16, 0.002),
        max_budget=32768,
    ),
    "sgd_momentum": Recipe(
        sgd_momentum,
        by_base(0.01, {2: -1, 8: 1, 32: 3, 128: 4}),
        optimizer=Sgd(),
        weight_decay=5e-4,
    ),
    "vit_images": Recipe(
        vit_images,
        by_base(0.001, {4: 0, 16: 1, 64: 3, 256: 4}),
        settings=defaults(16, 0.004),
        max_budget=20480,
        num_seeds=2,
    ),
    "sequences": Recipe(
        sequences, by_base(0.001, {2: 0, 8: 2, 32: 3, 128: 4}), settings=defaults(8, 0.002), num_seeds=2
    ),
    "gpt_stdlib": Recipe(
        gpt_stdlib,
        by_base(0.001, {1: -1, 4: 1, 16: 2, 64: 3}),
        settings=defaults(4, 0.004),
        max_budget=8192,
        num_seeds=2,
    ),
    "gpt_wikitext2": Recipe(
        gpt_wikitext2,
        by_base(0.001, {1: -1, 4: 1, 16: 2, 64: 3}),
        settings=defaults(4, 0.002),
        max_budget=8192,
        num_seeds=2,
    ),
    "gpt_finetuned": Recipe(
        gpt_topics,
        by_base(0.001, {1: -2, 4: -1, 16: 0, 64: 1}),
        settings=defaults(16, 0.002, weight_decay=0.01),
        max_budget=8192,
        num_seeds=2,
        warmup_steps=10,
        passes=4,
        begins_with=Pretraining(gpt_stdlib, 16, 0.004, 131072),
    ),
}


def options(name: str, recipe: Recipe) -> dict[str, Recipe]:
    """Return the same grid with settings that follow the batch otherwise, where at the reference batch they would be the same runs
    again, so that is left out; and with other warm-ups, at every batch; and with Muon, as it is recorded with AdamW."""
    own = recipe.settings
    if own is None:
        return {}
    fewer = replace(recipe, num_rates=5, num_seeds=2)
    changes: dict[str, dict[str, str]] = {
        "beta2_fixed": {"beta2_scaling": "none"},
        "decay_samples": {"weight_decay_scaling": "samples"},
    }
    centres = without(recipe.centres, own.reference_batch_size)
    followed = {
        option: replace(fewer, settings=own.model_copy(update=change), centres=centres)
        for option, change in changes.items()
    }
    warmed_up = {f"warmup_{steps}": replace(fewer, warmup_steps=steps) for steps in WARMUPS}
    with_muon = {"muon": replace(recipe, settings=own.model_copy(update={"type": "muon"}))} if name in WITH_MUON else {}
    return {f"{name}.{option}": found for option, found in (followed | warmed_up | with_muon).items()}


OPTIONS = {option: recipe for name, world in RECIPES.items() for option, recipe in options(name, world).items()}


@dataclass(frozen=True)
class Members:
    """Every rate with every seed: member r x num_seeds + s has rate r and seed s."""

    rates: Sequence[float]
    num_seeds: int

    def __iter__(self) -> Iterator[tuple[float, int]]:
        return ((rate, seed) for rate in self.rates for seed in range(self.num_seeds))

    def spread(self, by_seed: Tensor) -> Tensor:
        """(S, ...) to (M, ...): what a seed decides is the same at every rate."""
        return by_seed.expand(len(self.rates), *by_seed.shape).flatten(0, 1)


def starting(recipe: Recipe, task: Task, batch: int, members: Members) -> Ensemble:
    """Return the ensemble before its first step."""
    drawn = [initial_weights(task.shapes, seed) for seed in range(members.num_seeds)]
    weights = torch.stack(drawn if task.start is None else [task.start] * members.num_seeds)
    rates = torch.tensor([rate for rate, _ in members])
    optimizer: AdamW | Sgd | Muon = recipe.optimizer
    decays = torch.full_like(rates, recipe.weight_decay)
    if recipe.settings is not None:
        followed = [optimizer_at(recipe.settings, batch, rate) for rate, _ in members]
        adamw, decays = AdamW(followed[0].betas), torch.tensor([one.weight_decay for one in followed])
        optimizer = Muon(matrices_of_blocks(task.shapes), adamw) if recipe.settings.type == "muon" else adamw
    return ensemble(task.shapes, task.loss, optimizer, members.spread(weights), rates, decays)


def matrices_of_blocks(shapes: Shapes) -> frozenset[str]:
    """Return what `optimizer: muon` gives to Muon: world_tasks.py numbers the blocks of a transformer."""
    return frozenset(name for name, shape in shapes.items() if name[0].isdigit() and len(shape) == 2)


def sample_order(num_samples: int, num_wanted: int, seed: int) -> Tensor:
    """Return which samples a seed sees: the whole set in a new order each time."""
    generator = Generator().manual_seed(1000 + seed)
    epochs = [torch.randperm(num_samples, generator=generator) for _ in range(-(-num_wanted // num_samples))]
    return torch.cat(epochs)[:num_wanted]


class Batches:
    """The samples of each optimizer step, for all members."""

    def __init__(self, samples: Samples, batch: int, num_wanted: int, members: Members) -> None:
        orders = [sample_order(len(samples), num_wanted, seed) for seed in range(members.num_seeds)]
        self._samples, self._batch, self._members, self._orders = samples, batch, members, torch.stack(orders)

    def of_step(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step, which are numbered from 1."""
        chosen = self._orders[:, (step - 1) * self._batch : step * self._batch]
        spread = self._members.spread
        return spread(self._samples.inputs[chosen]), spread(self._samples.targets[chosen])


def schedule_of(batch: int, budget: int, warmup_steps: int) -> TrialConfig:
    """Return a trial that has the product's schedule, at a learning rate of 1."""
    return TrialConfig.model_validate({
        "model": {"target": "gpt"}, "data": {"target": "text"}, "learning_rate": 1.0, "micro_batch_size": batch,
        "sample_budget": budget, "warmup_samples": warmup_steps * batch,
    })  # fmt: skip


Points = list[tuple[int, Tensor]]
"""[(samples seen, the loss of each member)]"""


def recorded(recipe: Recipe, task: Task, batch: int, members: Members) -> Iterator[tuple[int, Points]]:
    """Yield (sample budget, points) for every horizon of a batch.

    One trunk runs at the full learning rate, and a copy of it anneals at each horizon. That is the run with that budget,
    from its first step on, since the warm-up depends on the batch alone.
    """
    horizons = recipe.horizons(batch)
    trunk, data = starting(recipe, task, batch, members), Batches(task.train, batch, horizons[-1], members)
    warmup_steps = min(recipe.warmup_steps, horizons[0] // batch // 5)
    evaluated = {place for budget in horizons for place in places(budget) if place <= DECAY_START * budget}
    leaves = {math.floor(DECAY_START * budget / batch): budget for budget in horizons}
    points: Points = []
    shared = schedule_of(batch, 10 * horizons[-1], warmup_steps)
    for step in range(1, max(leaves) + 1):
        trunk = trunk.step(*data.of_step(step), learning_rate_of_step(shared, (step - 1) * batch))
        if step * batch in evaluated:
            points.append((step * batch, trunk.losses(task.val.inputs, task.val.targets)))
        if step in leaves:
            budget = leaves[step]
            before = [point for point in points if point[0] in places(budget)]
            yield budget, before + annealed(trunk.copy(), task, data, schedule_of(batch, budget, warmup_steps))


def annealed(branch: Ensemble, task: Task, data: Batches, schedule: TrialConfig) -> Points:
    """Train to the end of the schedule and return the points on the way."""
    batch, budget = schedule.effective_batch_size, schedule.sample_budget
    points: Points = []
    for step in range(branch.num_steps + 1, budget // batch + 1):
        branch = branch.step(*data.of_step(step), learning_rate_of_step(schedule, (step - 1) * batch))
        if step * batch in places(budget):
            points.append((step * batch, branch.losses(task.val.inputs, task.val.targets)))
    return points


def places(budget: int) -> range:
    """Return the samples at which a run is evaluated."""
    return range(budget // POINTS, budget + 1, budget // POINTS)


def lines(recipe: Recipe, batch: int, members: Members, budget: int, points: Points) -> Iterator[dict[str, Any]]:
    """Yield a line for each member."""
    for number, (rate, seed) in enumerate(members):
        losses = [(samples, float(found[number])) for samples, found in points]
        yield {
            "effective_batch_size": batch,
            "learning_rate": rate,
            "seed": seed,
            "sample_budget": budget,
            "points": [[samples, rounded(loss)] for samples, loss in losses],
        } | settings_at(recipe, batch, rate)


def settings_at(recipe: Recipe, batch: int, rate: float) -> dict[str, Any]:
    """Return AdamW's settings for the line of a run, where they may follow its batch."""
    if recipe.settings is None:
        return {}
    found = optimizer_at(recipe.settings, batch, rate)
    return {"betas": [round(beta, 6) for beta in found.betas], "weight_decay": round(found.weight_decay, 6)}


def rounded(loss: float) -> float | None:
    return float(f"{loss:.5g}") if math.isfinite(loss) else None


def rates_to_add(recipe: Recipe, world: World | None, batch: int) -> list[float]:
    """Return the rates that a batch still lacks: all of them at first, then two more beyond an edge that is best."""
    if world is None or batch not in world.batches():
        return recipe.rates(batch)
    rates = world.rates(batch)
    if len(rates) >= recipe.num_rates + 2 * EXTENSIONS:
        return []
    finals = [world.final_losses(batch, budget) for budget in world.budgets(batch)]
    best = {min(final, key=lambda rate: final[rate]) for final in finals}
    below = [rates[0] / STEP**2, rates[0] / STEP] if rates[0] in best else []
    return below + ([rates[-1] * STEP, rates[-1] * STEP**2] if rates[-1] in best else [])


def task_of(recipe: Recipe) -> Task:
    task = recipe.task(recipe.max_budget // recipe.passes)
    return task if recipe.begins_with is None else replace(task, start=last_weights(recipe.begins_with))


def last_weights(run: Pretraining) -> Tensor:
    """Return (P)."""
    task, alone = run.task(run.sample_budget), Members([run.learning_rate], num_seeds=1)
    state, data = (
        starting(Recipe(run.task, {}), task, run.batch, alone),
        Batches(task.train, run.batch, run.sample_budget, alone),
    )
    schedule = schedule_of(run.batch, run.sample_budget, WARMUP_STEPS)
    for step in range(1, run.sample_budget // run.batch + 1):
        state = state.step(*data.of_step(step), learning_rate_of_step(schedule, (step - 1) * run.batch))
    return state.weights[0]


def record(name: str, recipe: Recipe, file: Path) -> None:
    """Append what the file still lacks, all horizons of a batch at a time, and say how it goes."""
    task = task_of(recipe)
    file.parent.mkdir(parents=True, exist_ok=True)
    for batch in recipe.centres:
        while rates := rates_to_add(recipe, load(file) if file.exists() else None, batch):
            started, members = time.perf_counter(), Members(rates, recipe.num_seeds)
            found = [
                line
                for budget, points in recorded(recipe, task, batch, members)
                for line in lines(recipe, batch, members, budget, points)
            ]
            with file.open("a") as out:
                out.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in found))
            seconds = time.perf_counter() - started
            print(f"{name}: batch {batch}, {len(rates)} rates from {rates[0]:g}, {seconds:.0f} s", flush=True)


def table(world: World) -> Iterator[str]:
    """Yield the best loss of each batch and budget, with its rate and its seeds' standard deviation."""
    for batch in world.batches():
        cells = [f"{budget}: {best_of(world, batch, budget)}" for budget in world.budgets(batch)]
        yield f"{world.name:<30} {batch:>4} | " + " | ".join(cells)
    yield f"{world.name:<30} the best rate goes with the batch to the power of {exponents_text(world)}"


def exponents_text(world: World) -> str:
    """Return, for each budget that three batches were recorded at, the power of the batch that the best rate goes with."""
    budgets = sorted({budget for batch in world.batches() for budget in world.budgets(batch)})
    found = {budget: world.batches_of(budget) for budget in budgets}
    return ", ".join(
        f"{rate_exponent({batch: best_rate(world, batch, budget) for batch in batches}):.2f} at {budget:,}"
        for budget, batches in found.items()
        if len(batches) >= 3
    )


def rate_exponent(best: Mapping[int, float]) -> float:
    """Return the power of the batch that the best rates {batch: rate} go with."""
    return statistics.linear_regression([math.log(b) for b in best], [math.log(rate) for rate in best.values()]).slope


def best_rate(world: World, batch: int, budget: int) -> float:
    """Return the learning rate at the lowest point of the parabola through the best recorded one and its neighbours."""
    finals = world.final_losses(batch, budget)
    rates = sorted(finals)
    at = rates.index(min(finals, key=lambda rate: finals[rate]))
    around = [finals[rates[i]] for i in (at - 1, at, at + 1)]
    below, lowest, above = (loss - around[1] for loss in around)
    if not math.isfinite(below + above):
        return rates[at]
    return rates[at] * (rates[at + 1] / rates[at]) ** ((below - above) / (2 * (below + above - 2 * lowest)))


@dataclass(frozen=True)
class Best:
    """The best learning rate of a batch and a budget, by the mean over seeds."""

    rate: float
    mean: float
    deviation: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} +- {self.deviation:.4f} @ {self.rate:.3g}"


def best_of(world: World, batch: int, budget: int) -> Best:
    finals = world.final_losses(batch, budget)
    rate = min(finals, key=lambda rate: finals[rate])
    losses = [world.loss(batch, rate, seed, budget, budget) or math.inf for seed in world.seeds()]
    return Best(rate, finals[rate], statistics.stdev(losses) if len(losses) > 1 else math.nan)


def comparison(option: World) -> Iterator[str]:
    """Yield the best loss of each batch and budget without and with an option, over the seeds that both have."""
    base = load(file_of(option.name.partition(".")[0]))
    base = World(base.name, tuple(run for run in base.runs if run.seed in option.seeds()))
    for batch in option.batches():
        for budget in option.budgets(batch):
            without, with_it = best_of(base, batch, budget), best_of(option, batch, budget)
            yield f"{option.name:<32} {batch:>4} {budget:>6} | {without} | {with_it} | {with_it.mean / without.mean - 1:+.1%}"
    if len(option.batches()) == len(base.batches()):
        yield f"{option.name:<32} the best rate goes with the batch to the power of {exponents_text(option)}"


def file_of(name: str) -> Path:
    return (WORLDS / "options" if name in OPTIONS else WORLDS) / f"{name}.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which worlds or options; none: all")
    parser.add_argument(
        "--wikitext", type=Path, metavar="DIR", help="the directory with WikiText-2's test.txt and valid.txt"
    )
    parser.add_argument("--threads", type=int, default=1, help="more than one pays on an idle machine only")
    parser.add_argument(
        "--table", action="store_true", help="print the best losses of what is recorded, and record nothing"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.set_flush_denormal(True)
    for name in chosen.names or [*RECIPES, *OPTIONS]:
        if not chosen.table:
            record(name, with_text(name, (RECIPES | OPTIONS)[name], chosen.wikitext), file_of(name))
        world = load(file_of(name))
        print("\n".join(comparison(world) if name in OPTIONS else table(world)), flush=True)


def with_text(name: str, recipe: Recipe, wikitext: Path | None) -> Recipe:
    if recipe.task is not gpt_wikitext2:
        return recipe
    if wikitext is None:
        raise ValueError(f"world {name} trains on WikiText-2; say where its test.txt and valid.txt lie: --wikitext DIR")
    return replace(recipe, task=partial(gpt_wikitext2, wikitext))


if __name__ == "__main__":
    main()
