"""Which batch, activation checkpointing and learning rate to train with.

study = batchscout.find(model=lambda: Net(), loss="cross_entropy", train=train_set, val=val_set)
study = batchscout.load("runs/quickstart")  # or one that has run; this needs neither torch nor Ray
print(study)                                # the answer; study.recommendation has it as fields
study.best, study.trials()                  # the recommended run, and all as a pandas.DataFrame
study.trial("train-m4k1")                   # any run; study.explain("train-m4k1") says why it ran
study.figures()["surface"]                  # a picture; print(study.export("hf")): lines for a trainer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchscout.orchestrator.output.loaded import LoadedStudy as Study
    from batchscout.orchestrator.output.recommendation import Recommendation

__all__ = ["Recommendation", "Study", "find", "load"]
_AT_FIRST_USE = {
    "Recommendation": ("output.recommendation", "Recommendation"),
    "Study": ("output.loaded", "LoadedStudy"),
}
"""Every process of a study imports this package, and few of them need these."""


def __getattr__(name: str) -> Any:
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _AT_FIRST_USE[name]
    return getattr(import_module(f"batchscout.orchestrator.{module}"), attribute)


def find(
    *,
    model: Any = None,
    train: Any = None,
    val: Any = None,
    loss: Any = None,
    lightning: Callable[[], Any] | None = None,
    transformers: Callable[[], Any] | None = None,
    script: str | None = None,
    run_dir: str | Path | None = None,
    stages: Sequence[str | Mapping[str, Any]] | None = None,
    address: str | None = None,
    fresh: bool = False,
    retry_failed: bool = False,
    keep_finished: bool = False,
    quiet: bool = False,
    **keys: Any,
) -> Study:
    """Run a study of these objects, or resume it; ValueError for bad input. model: a module, whose weights all runs
    start from, or what makes one. train, val: data sets or DataLoaders. loss: as in study files, or loss(module,
    batch) -> (loss_sum, num_targets), or None if the module returns these. lightning: makes (model, loaders or
    datamodule[, Trainer]); transformers: a Trainer; script: a command. keys: of study files; others: of `run`.
    """
    from batchscout.orchestrator.environment import fit_environment, importing_ray
    from batchscout.trainers.descendants import ending_what_is_started

    with fit_environment(), ending_what_is_started():
        with importing_ray():
            from batchscout.orchestrator.find import Subject
            from batchscout.orchestrator.find import find as run  # loads torch, too

        subject = Subject(model, train, val, loss, lightning, transformers, script)
        options = {"fresh": fresh, "retry_failed": retry_failed, "keep_finished": keep_finished, "quiet": quiet}
        return run(subject, run_dir=run_dir, stages=stages, address=address, **options, **keys)


def load(run_dir: str | Path) -> Study:
    """Return the study of a run directory; it may be running. Raises ValueError where there is none."""
    from batchscout.orchestrator.output.loaded import load as read

    return read(run_dir)
