"""A study's answer against the grid of its own candidates, each trained for real at equal cost.

    batchscout run configs/quickstart.yaml && python benchmarks/real_grid.py [RUN_DIR] [--exponents -1 0 1 2 3] [--seeds 2]
        [--device cpu|cuda] [--quick]

The study's batches are trained with the samples that it gave each of them, at the scaling rule's learning rate times
2^exponent, with several seeds; so is its recommendation. Nothing is pruned or foretold. Every run is appended to
grid.jsonl in RUN_DIR: the same command goes on where it stopped. RUN_DIR is by default what the quickstart leaves.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.trial import scaled_learning_rate
from batchscout.orchestrator.output.recommendation import Recommendation, recommend
from batchscout.orchestrator.stages.candidates import Candidate, seeded
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.train.lineup import lineup_of
from batchscout.orchestrator.study.journal import replay
from batchscout.orchestrator.study.run_directory import load_stored_study
from batchscout.orchestrator.study.state import Study
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.loop import train
from batchscout.trainers.report import Answer, Report


@dataclass(frozen=True)
class GridRun:
    """One full training run."""

    effective_batch_size: int
    learning_rate: float
    seed: int
    val_loss: float
    """Infinite where it diverged."""
    train_seconds: float


@dataclass(frozen=True)
class Grid:
    """All runs of a study's grid."""

    runs: tuple[GridRun, ...]

    def losses(self) -> dict[tuple[int, float], list[float]]:
        """Return the losses of each (effective batch, learning rate) over the seeds."""
        found: dict[tuple[int, float], list[float]] = {}
        for run in self.runs:
            found.setdefault((run.effective_batch_size, run.learning_rate), []).append(run.val_loss)
        return found

    def best(self) -> tuple[int, float]:
        losses = self.losses()
        return min(losses, key=lambda point: statistics.fmean(losses[point]))

    def seed_deviation(self) -> float:
        """Return the deviation of a run's loss from seed to seed, pooled over each batch's best rate."""
        by_batch: dict[int, list[list[float]]] = {}
        for (batch, _), losses in self.losses().items():
            by_batch.setdefault(batch, []).append(losses)
        best = [min(of_batch, key=statistics.fmean) for of_batch in by_batch.values()]
        return math.sqrt(statistics.fmean(statistics.variance(losses) for losses in best))


def main(argv: list[str] | None = None) -> None:
    arguments = _arguments(argv)
    config, study = _study(arguments.run_dir)
    answer = recommend(config, study)
    if answer is None:
        raise SystemExit(f"{arguments.run_dir} holds no recommendation; let the study end first")
    file = arguments.run_dir / "grid.jsonl"
    wanted = list(_configs(config, study, answer, arguments.exponents, range(arguments.seeds)))
    grid = Grid(tuple(_run(one, file) for one in wanted))
    print(_table(grid, answer))
    print(json.dumps(_judged(grid, answer, study)))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, nargs="?", default=Path("runs/quickstart"))
    parser.add_argument("--exponents", type=float, nargs="+", default=[-1, 0, 1, 2, 3])
    parser.add_argument("--seeds", type=int, default=2, help="at least 2: the spread is measured from them")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="torch takes the one that it finds")
    parser.add_argument("--quick", action="store_true", help="two rates: to see that it runs, not to quote it")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 2:
        parser.error(f"--seeds {arguments.seeds}: the spread from seed to seed takes at least 2")
    if arguments.quick:
        arguments.exponents = arguments.exponents[:2]
    return arguments


def _study(run_dir: Path) -> tuple[StudyConfig, Study]:
    config = load_stored_study(run_dir / "study.yaml")
    return config, replay(run_dir / "journal.jsonl", config.name)


def _configs(
    config: StudyConfig, study: Study, answer: Recommendation, exponents: list[float], seeds: range
) -> Iterator[TrialConfig]:
    """Yield every run of the grid: each candidate at each rate, and the recommendation at its own."""
    keys = next(stage for stage in config.stages if stage.type == "train")
    context = StageContext(keys, config.model_copy(update={"seeds": tuple(seeds)}), Study(config.name))
    context.study.conclusions.update(study.conclusions)
    context.study.facts = study.facts
    for candidate in lineup_of(context).candidates:
        batch = candidate.split.effective_batch_size
        rule = scaled_learning_rate(config.optimizer, batch)
        rates = [rule * 2**exponent for exponent in exponents]
        if batch == answer.effective_batch_size and answer.learning_rate not in rates:
            rates.append(answer.learning_rate)
        for rate in rates:
            yield from _seeded(context, candidate, rate)


def _seeded(context: StageContext, candidate: Candidate, rate: float) -> Iterator[TrialConfig]:
    name = f"grid-{candidate.split}-lr{rate:.6g}"
    yield from (one.config for one in seeded(context, name, candidate, learning_rate=rate, rungs=(), evaluations=()))


def _run(config: TrialConfig, file: Path) -> GridRun:
    """Train, or return what the file has of the run."""
    key = (config.effective_batch_size, config.learning_rate, config.seed)
    for line in file.read_text().splitlines() if file.exists() else ():
        known = GridRun(**json.loads(line))
        if (known.effective_batch_size, known.learning_rate, known.seed) == key:
            return known
    run = _trained(config)
    with file.open("a") as lines:
        lines.write(json.dumps(asdict(run)) + "\n")
    print(f"{key[0]:5d}  {key[1]:.3g}  seed {key[2]}: {run.val_loss:.4f} ({run.train_seconds:.1f} s)", flush=True)
    return run


def _trained(config: TrialConfig) -> GridRun:
    last: dict[str, float] = {}

    def keep(report: Report) -> Answer:
        last.update(report.metrics)
        return Answer.GO_ON

    with tempfile.TemporaryDirectory() as folder:
        train(config, keep, Path(folder))
    loss = last["val_loss"]
    return GridRun(
        config.effective_batch_size,
        config.learning_rate,
        config.seed,
        loss if math.isfinite(loss) else math.inf,
        last["train_seconds"],
    )


def _table(grid: Grid, answer: Recommendation) -> str:
    """Return the mean losses as a Markdown table, a row for each batch and a column for each rate's place."""
    losses, best = grid.losses(), grid.best()
    chosen = (answer.effective_batch_size, answer.learning_rate)
    rows = [["effective batch", "learning rate: val loss, mean over the seeds"]]
    for batch, points in itertools.groupby(sorted(losses), key=lambda point: point[0]):
        cells = []
        for point in points:
            text = f"{point[1]:.2g}: {statistics.fmean(losses[point]):.3f}"
            mark = " (best)" if point == best else ""
            cells.append(f"**{text}** (recommended){mark}" if point == chosen else text + mark)
        rows.append([str(batch), "; ".join(cells)])
    rows.insert(1, ["---", "---"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _judged(grid: Grid, answer: Recommendation, study: Study) -> dict[str, object]:
    losses, best = grid.losses(), grid.best()
    chosen = statistics.fmean(losses[answer.effective_batch_size, answer.learning_rate])
    least, spread = statistics.fmean(losses[best]), grid.seed_deviation()
    trained = sum(trial.metric("train_seconds") or 0.0 for trial in study.trials.values())
    return {
        "right": chosen <= least + spread,
        "regret": round((chosen - least) / least, 4),
        "batch_right": min(_of_batch(losses, answer.effective_batch_size)) <= least + spread,
        "seed_deviation": round(spread, 4),
        "best_batch": best[0],
        "best_rate": best[1],
        "chosen_batch": answer.effective_batch_size,
        "chosen_rate": answer.learning_rate,
        "p_best": answer.p_best,
        "grid_runs": len(grid.runs),
        "grid_train_seconds": round(sum(run.train_seconds for run in grid.runs), 1),
        "study_train_seconds": round(trained, 1),
    }


def _of_batch(losses: dict[tuple[int, float], list[float]], batch: int) -> Iterator[float]:
    return (statistics.fmean(some) for (of, _), some in losses.items() if of == batch)


if __name__ == "__main__":
    main()
