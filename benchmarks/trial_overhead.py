"""Seconds per trivial trial: lanes, against Ray Tune and Ray Train composed as Ray documents it.

    python benchmarks/trial_overhead.py [--device cpu|cuda] [--quick]

Both sides run the same training function on the same tiny model for a few optimizer steps, one trial at a time, in
blocks that alternate within one run and one Ray cluster: 10 trials of ours (a lane starts once a study, so a block is a
study), 5 of the other side's (each starts everything anew, so their number does not matter). Seconds per trial are
wall-clock over the whole block, start-up included; `steady` is the median trial of ours once its lane is warm, and a
last study says what compiling adds to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from side_by_side import options

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.load import parse_study
from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.execution.session import start_ray
from batchscout.orchestrator.run import RunOptions, run_study
from batchscout.orchestrator.study.journal import replay

OUR_TRIALS = 10
# The Ray cluster's CPUs, however many the machine has: a naive Tune trial takes one besides its workers' own.
NUM_CPUS = 4
STUDY: dict[str, Any] = {
    "name": "overhead",
    "model": {"target": "gpt", "kwargs": {"num_layers": 1, "num_heads": 2, "hidden_dim": 32}},
    "data": {"target": "python_stdlib", "kwargs": {"seq_len": 32, "tokenizer": "bytes", "max_text_bytes": 300_000}},
    "sample_budget": 8,
    "evaluation_samples": 4,
    "evaluations": 1,
    "placement": {"lanes": 1, "cpus_per_rank": 1},
}


def main() -> None:
    chosen = options(__doc__)
    blocks, naive_trials, all_ranks = (1, 2, (1,)) if chosen.quick else (2, 5, ranks_that_fit(chosen.device))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"  # or an earlier run's code would be found
        start_ray(_study(1, 4, compiled=False), None, Path(folder), num_cpus=NUM_CPUS)
        results = {ranks: _compare(ranks, blocks, naive_trials, Path(folder), chosen.device) for ranks in all_ranks}
        compiled = _compile_cost(Path(folder))
    _print_table(results, compiled)
    print(json.dumps(_last_line(results, compiled)))


def ranks_that_fit(device: str) -> tuple[int, ...]:
    """Return the numbers of ranks to compare: two need a GPU each, since NCCL refuses to share one."""
    import torch

    return (1,) if device == "cuda" and torch.cuda.device_count() < 2 else (1, 2)


def _compare(ranks: int, blocks: int, naive_trials: int, folder: Path, device: str) -> dict[str, Any]:
    """Run blocks of ours and naive in turn. Return each block's seconds per trial, and the steady seconds of ours."""
    ours, naive, steady = [], [], []
    for block in range(blocks):
        seconds, held = _ours(ranks, OUR_TRIALS, folder / f"ours-{ranks}-{block}")
        ours.append(seconds / OUR_TRIALS)
        steady += held[1:]
        print(f"{ranks} rank(s), block {block + 1}: ours {ours[-1]:.2f} s per trial", flush=True)
        with _rays_defaults():
            naive.append(_naive(ranks, naive_trials, folder / f"naive-{ranks}-{block}", device) / naive_trials)
        print(f"{ranks} rank(s), block {block + 1}: Tune + TorchTrainer {naive[-1]:.2f} s per trial", flush=True)
    return {"ours": ours, "naive": naive, "steady": steady}


@contextlib.contextmanager
def _rays_defaults() -> Iterator[None]:
    """Take away the Ray Train settings that lanes are started with, so that the other side is Ray as it comes."""
    ours = {key: os.environ.pop(key) for key in list(os.environ) if key.startswith("RAY_TRAIN_")}
    try:
        yield
    finally:
        os.environ.update(ours)


def _study(ranks: int, num_rates: int, *, compiled: bool, micro_batch_sizes: tuple[int, ...] = (2,)) -> StudyConfig:
    grid = {
        "type": "grid",
        "compile": [compiled],
        "micro_batch_size": list(micro_batch_sizes),
        "learning_rate": [1e-4 * (i + 1) for i in range(num_rates)],
    }
    return parse_study(STUDY | {"world_size": ranks, "stages": [grid]}, "the benchmark's study")


def _ours(ranks: int, trials: int, run_dir: Path) -> tuple[float, list[float]]:
    """Return (wall-clock seconds of the whole study, the seconds that each trial held its lane)."""
    started = time.perf_counter()
    ending = run_study(_study(ranks, trials, compiled=False), run_dir, RunOptions(quiet=True))
    seconds = time.perf_counter() - started
    assert ending.exit_code == 0, ending.message
    return seconds, [trial.seconds for trial in replay(run_dir / "journal.jsonl", "overhead").trials.values()]


def _naive(ranks: int, trials: int, folder: Path, device: str) -> float:
    """Return the wall-clock seconds of a Tuner whose function trainable fits a TorchTrainer, as Ray's guide has it."""
    from ray import train, tune
    from ray.train.torch import TorchTrainer
    from ray.tune.integration.ray_train import TuneReportCallback

    config = base_trial(_study(ranks, 1, compiled=False), None)
    config = config.model_copy(update={"compile": False, "micro_batch_size": 2, "world_size": ranks})

    def one_trial(space: dict[str, Any]) -> None:
        trainer = TorchTrainer(
            _train_function,
            train_loop_config={"config": config.model_dump(mode="json") | space, "folder": str(folder)},
            scaling_config=train.ScalingConfig(num_workers=ranks, use_gpu=device == "cuda"),
            run_config=train.RunConfig(
                name=f"trial-{tune.get_context().get_trial_id()}",
                storage_path=str(folder),
                callbacks=[TuneReportCallback()],
            ),
        )
        trainer.fit()

    started = time.perf_counter()
    results = tune.Tuner(
        one_trial,
        param_space={"learning_rate": tune.grid_search([1e-4 * (i + 1) for i in range(trials)])},
        tune_config=tune.TuneConfig(max_concurrent_trials=1),
        run_config=tune.RunConfig(name="naive", storage_path=str(folder), verbose=0),
    ).fit()
    assert not results.errors, results.errors
    return time.perf_counter() - started


def _train_function(given: dict[str, Any]) -> None:
    """What a Ray Train worker of the naive side runs: the same training, reported as Ray documents it."""
    import uuid

    from ray import train

    from batchscout.trainers.config import TrialConfig
    from batchscout.trainers.device import gpu_memory
    from batchscout.trainers.loop import train as train_one
    from batchscout.trainers.report import Report

    # Each of these trials is a process of its own, whose first report would wait 2 to 20 s to read what it can have of
    # a GPU. That reading is ours, made for a lane that does it once, and is not to count as Ray's time.
    gpu_memory.MOST_SECONDS_TO_SETTLE = 0.0
    last: list[dict[str, float]] = [{}]

    def keep(report: Report) -> None:
        last[0] = report.metrics

    config = TrialConfig.model_validate(given["config"])
    train_one(config, keep, Path(given["folder"]) / uuid.uuid4().hex)
    train.report(last[0])


def _compile_cost(folder: Path) -> dict[str, float | None]:
    """Return the seconds that a trial holds a warm lane: one that compiles, and one that finds its code compiled."""
    run_dir = folder / "compiled"
    ending = run_study(_study(1, 3, compiled=True, micro_batch_sizes=(2, 3)), run_dir, RunOptions(quiet=True))
    assert ending.exit_code == 0, ending.message
    trials = list(replay(run_dir / "journal.jsonl", "overhead").trials.values())
    compiles = [t.seconds for t in trials[1:] if t.measured("compile_seconds") > 0]
    warm = [t.seconds for t in trials if t.measured("compile_seconds") == 0]
    return {"recompile_seconds": _median(compiles), "no_recompile_seconds": _median(warm)}


def _median(seconds: list[float]) -> float | None:
    """Return the median; None of none: on a GPU each trial on a fresh process compiles, and none may be left."""
    return statistics.median(seconds) if seconds else None


def _text(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def _print_table(results: dict[int, dict[str, Any]], compiled: dict[str, float | None]) -> None:
    import ray
    import torch

    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}, ray {ray.__version__}"
    )
    print("seconds per trial, of each block")
    print(f"{'ranks':>6} {'ours':>16} {'Tune + TorchTrainer':>22} {'ratio':>7} {'ours, steady':>14}")
    for ranks, found in results.items():
        ours, naive = (" ".join(f"{value:.2f}" for value in found[side]) for side in ("ours", "naive"))
        print(f"{ranks:>6} {ours:>16} {naive:>22} {_ratio(found):>7.1f} {_text(_median(found['steady'])):>14}")
    print(
        f"a warm lane, 1 rank: {_text(compiled['no_recompile_seconds'])} s for a trial whose code is compiled, "
        f"{_text(compiled['recompile_seconds'])} s for one of another shape"
    )


def _ratio(found: dict[str, Any]) -> float:
    return statistics.median(found["naive"]) / statistics.median(found["ours"])


def _last_line(results: dict[int, dict[str, Any]], compiled: dict[str, float | None]) -> dict[str, Any]:
    one, two = results[1], results.get(2)
    return {
        "ratio_1_rank": _ratio(one),
        "ratio_2_ranks": _ratio(two) if two else None,
        "ours_seconds": statistics.median(one["ours"]),
        "naive_seconds": statistics.median(one["naive"]),
        "steady_seconds": _median(one["steady"]),
        **compiled,
    }


if __name__ == "__main__":
    main()
