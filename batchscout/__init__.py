"""batchscout in Python: `find` runs a study of objects that a script or a notebook has, `load` reads one from its run directory.

    import batchscout

    study = batchscout.find(model=lambda: Net(), loss="cross_entropy", train=train_set, val=val_set, memory_limit="8GiB")
    print(study)                    # the answer
    study.recommendation            # the same as a value
    study.trials()                  # a pandas.DataFrame
    study.figure("surface")         # a picture of the report, which a notebook shows

To read a study needs neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchscout.orchestrator.output.loaded import LoadedStudy as Study
    from batchscout.orchestrator.output.loaded import load
    from batchscout.orchestrator.output.recommendation import Recommendation

__all__ = ["Recommendation", "Study", "find", "load"]
_AT_FIRST_USE = {
    "Recommendation": ("output.recommendation", "Recommendation"),
    "Study": ("output.loaded", "LoadedStudy"),
    "load": ("output.loaded", "load"),
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
    quiet: bool = False,
    **keys: Any,
) -> Study:
    """Run a study, or go on with it, and return it. The same call again goes on from its run directory.

    model: a callable that makes an nn.Module, so that each seed has weights of its own, or a module, with whose weights every run
    begins. train, val: map-style data sets, streams or DataLoaders. loss: as in a study file, or a callable loss(module, batch) ->
    (loss_sum, num_targets); None where the module returns these. lightning: instead of these four, a callable that returns
    (model, train_loader, val_loader) or (model, datamodule), and the Trainer last if there is one. transformers: likewise, one that
    returns a Trainer. script: instead of all these, the command line of a script that trains, "train.py --lr 1e-3": it runs until its
    second optimizer step.
    run_dir: where the study lives; runs/<the script's name> if it is None. stages: their names, or keys; all five if it is None.
    address, fresh: as of `batchscout run`. quiet: no progress is shown. keys: any other key of a study file, such as
    memory_limit="8GiB" or optimizer={"lr": 1e-3}.

    Raises ValueError for bad input, and KeyboardInterrupt where Ctrl-C has ended it; nothing is lost then.
    """
    from batchscout.orchestrator.environment import fit_environment, importing_ray

    with fit_environment():
        with importing_ray():
            from batchscout.orchestrator.find import Subject
            from batchscout.orchestrator.find import find as run  # loads torch, too

        subject = Subject(model, train, val, loss, lightning, transformers, script)
        return run(subject, run_dir=run_dir, stages=stages, address=address, fresh=fresh, quiet=quiet, **keys)
