"""Recorded worlds: the validation losses of full runs over batches, learning rates, seeds and sample budgets, to be replayed.

A world is a file of JSON lines, one full run a line: `effective_batch_size`, `learning_rate`, `seed`, `sample_budget` and
`points`, a list of [samples seen, validation loss] in their order. The loss of a point at which the run had diverged is
null; a bare null in place of a point says that the run had diverged right after the point before it. Other keys (`betas`,
`noise_scale`, ...) are kept, and nothing here reads them.

Tables from elsewhere may hold any budgets, any points, other learning rates for each batch and budget, and other seeds for
each run. `record_worlds.py` records those beside it in `worlds/`.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

SAME = 1e-9
"""The relative difference up to which two learning rates are one: that of a decimal fraction written and read again."""


@dataclass(frozen=True)
class Run:
    """One line: a run from its first step to the end of its own schedule."""

    effective_batch_size: int
    learning_rate: float
    seed: int
    sample_budget: int
    points: tuple[tuple[int, float | None], ...]
    """(samples seen, validation loss), up to the first point at which it had diverged (None)."""
    other_keys: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def final_loss(self) -> float | None:
        """The loss at its last point; None where it had diverged."""
        return self.points[-1][1]

    def loss_at(self, fraction: float) -> float | None:
        """Return the loss at a fraction of the schedule: that of the first or last point where it lies beyond them."""
        places = [samples / self.sample_budget for samples, _ in self.points]
        low, high = _neighbours(places, min(max(fraction, places[0]), places[-1]))
        share = _share(places[low], places[high], fraction)
        return _between(self.points[low][1], self.points[high][1], share)


Cells = dict[int, dict[int, dict[float, dict[int, Run]]]]
"""{effective batch size: {sample budget: {learning rate: {seed: its run}}}}, in rising order"""


@dataclass(frozen=True)
class World:
    """All runs of one table."""

    name: str
    runs: tuple[Run, ...]

    def batches(self) -> list[int]:
        return list(self._cells)

    def rates(self, effective_batch_size: int) -> list[float]:
        """Return the learning rates that were run at a batch, of whatever budget."""
        return sorted({rate for rates in self._of_batch(effective_batch_size).values() for rate in rates})

    def budgets(self, effective_batch_size: int) -> list[int]:
        return list(self._of_batch(effective_batch_size))

    def batches_of(self, sample_budget: int) -> list[int]:
        """Return the batches that were run with this budget."""
        return [batch for batch in self.batches() if sample_budget in self.budgets(batch)]

    def seeds(self) -> list[int]:
        """Return every seed of any run. `loss` answers for each of them everywhere."""
        return sorted({run.seed for run in self.runs})

    def final_losses(self, effective_batch_size: int, sample_budget: int) -> dict[float, float]:
        """Return {learning rate: mean loss over seeds at the end}, infinite where any seed has diverged."""
        runs = self._of_batch(effective_batch_size)[sample_budget]
        ends = {rate: [run.final_loss for run in of.values()] for rate, of in runs.items()}
        return {rate: fmean(math.inf if loss is None else loss for loss in losses) for rate, losses in ends.items()}

    def loss(
        self, effective_batch_size: int, learning_rate: float, seed: int, sample_budget: int, samples_seen: float
    ) -> float | None:
        """Return the validation loss at `samples_seen` of a run with that budget; None where it has diverged.

        It is linear in the log of the learning rate and in the log of the budget between two that were recorded, at the
        same fraction of the schedule. Where one of two neighbours has diverged, the nearer one decides.
        """
        budgets = self._of_batch(effective_batch_size)
        if not 0 <= samples_seen <= sample_budget:
            self._refuse("samples_seen", samples_seen, [0, sample_budget])
        recorded = list(budgets)
        if not recorded[0] <= sample_budget <= recorded[-1]:
            self._refuse(f"sample_budget of batch {effective_batch_size}", sample_budget, recorded)
        fraction = samples_seen / sample_budget
        low, high = _neighbours(recorded, sample_budget)
        less, more = (self._at_budget(budgets[recorded[at]], learning_rate, seed, fraction) for at in (low, high))
        return _between(less, more, _share(math.log(recorded[low]), math.log(recorded[high]), math.log(sample_budget)))

    def _at_budget(
        self, rates: Mapping[float, Mapping[int, Run]], learning_rate: float, seed: int, fraction: float
    ) -> float | None:
        recorded = list(rates)
        if not recorded[0] * (1 - SAME) <= learning_rate <= recorded[-1] * (1 + SAME):
            self._refuse(f"learning_rate of {self._place(rates)}", learning_rate, recorded)
        low, high = _neighbours(recorded, learning_rate)
        less, more = (self._with_seed(rates[recorded[at]], seed).loss_at(fraction) for at in (low, high))
        return _between(less, more, _share(math.log(recorded[low]), math.log(recorded[high]), math.log(learning_rate)))

    def _with_seed(self, runs: Mapping[int, Run], seed: int) -> Run:
        """Return the run with that seed. Where a table has other seeds at each run, one of them always stands for it."""
        if seed in runs:
            return runs[seed]
        if seed not in self._seed_numbers:
            self._refuse("seed", seed, list(self._seed_numbers))
        return list(runs.values())[self._seed_numbers[seed] % len(runs)]

    def _of_batch(self, effective_batch_size: int) -> dict[int, dict[float, dict[int, Run]]]:
        if effective_batch_size not in self._cells:
            self._refuse("effective_batch_size", effective_batch_size, list(self._cells))
        return self._cells[effective_batch_size]

    @cached_property
    def _cells(self) -> Cells:
        cells: Cells = {}
        for run in sorted(self.runs, key=_place_of):
            budgets = cells.setdefault(run.effective_batch_size, {})
            budgets.setdefault(run.sample_budget, {}).setdefault(run.learning_rate, {})[run.seed] = run
        return cells

    @cached_property
    def _seed_numbers(self) -> dict[int, int]:
        return {seed: number for number, seed in enumerate(self.seeds())}

    def _place(self, rates: Mapping[float, Mapping[int, Run]]) -> str:
        run = next(run for runs in rates.values() for run in runs.values())
        return f"batch {run.effective_batch_size} at {run.sample_budget:,} samples"

    def _refuse(self, what: str, value: float, recorded: Sequence[float]) -> NoReturn:
        listed = ", ".join(f"{number:g}" for number in recorded)
        raise ValueError(
            f"world {self.name}: {what} is {value:g}, and recorded is {listed}; ask within that, or record more runs"
        )


def load(path: Path) -> World:
    """Read a world, named after its file; refuse a line that is none by its file and number."""
    runs: dict[tuple[int, int, float, int], Run] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            run = run_of(line)
            if _place_of(run) in runs:
                raise ValueError("the same batch, learning rate, seed and budget stand on an earlier line; keep one")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        runs[_place_of(run)] = run
    if not runs:
        raise ValueError(f"{path} holds no run; a world is one run a line, as JSON")
    return World(path.name.removesuffix(".jsonl"), tuple(runs.values()))


def run_of(line: str) -> Run:
    """Read one line."""
    try:
        found = json.loads(line, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error}); write one object a line") from None
    if not isinstance(found, dict):
        raise ValueError(f"{found!r} is no object; write one object a line")
    batch, seed, budget = (_whole(found, key) for key in ("effective_batch_size", "seed", "sample_budget"))
    rate = _number(found, "learning_rate")
    if not (batch > 0 and budget > 0 and rate > 0):
        raise ValueError(f"batch {batch}, budget {budget} and learning rate {rate:g} must all be above 0")
    others = {key: value for key, value in found.items() if key not in Run.__dataclass_fields__}
    return Run(batch, rate, seed, budget, _points(found.get("points")), others)


def _points(found: object) -> tuple[tuple[int, float | None], ...]:
    """Check the points, and return those up to the first that had diverged: what has diverged does not come back."""
    if not isinstance(found, list) or not found:
        raise ValueError(f"points is {found!r}; write a list of [samples seen, loss], with at least one")
    points: list[tuple[int, float | None]] = []
    for entry in found:
        before = points[-1][0] if points else 0
        samples, loss = _point([before + 1, None] if entry is None else entry)
        if points and samples <= before:
            raise ValueError(f"a point at {samples} samples follows one at {before}; write them in rising order")
        points.append((samples, loss))
        if loss is None:
            break
    return tuple(points)


def _point(entry: object) -> tuple[int, float | None]:
    match entry:
        case [int() as samples, None | int() | float() as loss] if samples >= 0 and math.isfinite(loss or 0):
            return samples, None if loss is None else float(loss)
    raise ValueError(f"point {entry!r} is not [samples seen, loss]; write two numbers, or null for a diverged loss")


def _number(found: Mapping[str, object], key: str) -> float:
    value = found.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} is {value!r}; write a number")
    return float(value)


def _whole(found: Mapping[str, object], key: str) -> int:
    value = _number(found, key)
    if not value.is_integer():
        raise ValueError(f"{key} is {value:g}; write a whole number")
    return int(value)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number; write null for a diverged loss")


def _place_of(run: Run) -> tuple[int, int, float, int]:
    return run.effective_batch_size, run.sample_budget, run.learning_rate, run.seed


def _neighbours(recorded: Sequence[float], value: float) -> tuple[int, int]:
    """Return where the two stand between which a value lies: twice the same where it is one of them, or at the edge."""
    above = min(bisect_left(recorded, value * (1 - SAME)), len(recorded) - 1)
    if above == 0 or value >= recorded[above] * (1 - SAME):
        return above, above
    return above - 1, above


def _share(low: float, high: float, value: float) -> float:
    return 0.0 if low == high else (value - low) / (high - low)


def _between(low: float | None, high: float | None, share: float) -> float | None:
    """Return the value at a share of the way. Where one has diverged the nearer one decides, halfway the other."""
    if low is not None and high is not None:
        return low + share * (high - low)
    if share == 0.5:
        return high if low is None else low
    return low if share < 0.5 else high
