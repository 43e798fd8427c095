"""`batchscout.find`: a study of objects that this process has, from a script or a notebook."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.load import study_of
from orchestrator.execution.code_shipping import import_from_here
from orchestrator.output.loaded import LoadedStudy, load
from orchestrator.run import run_study
from orchestrator.study.storage.place import on_this_machine, run_place_of
from trainers.files import make_private_directory
from trainers.sources import objects


@dataclass(frozen=True)
class Subject:
    """What a study is to be of: a model with its data, or a callable that makes an object that trains elsewhere."""

    model: Any = None
    train: Any = None
    val: Any = None
    loss: Any = None
    lightning: Callable[[], Any] | None = None
    transformers: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError where it is not one of them, and whole."""
        given = [name for name, value in vars(self).items() if value is not None]
        makers = [name for name in ("lightning", "transformers") if name in given]
        if makers and len(given) > 1:
            raise ValueError(
                f"find has {' and '.join(given)}; {makers[0]} stands for model, data and loss: give it alone"
            )
        missing = [name for name in ("model", "train", "val") if name not in given]
        if not makers and missing:
            raise ValueError(
                f"find lacks {', '.join(missing)}; give model, train and val, or lightning=make, or transformers=make_trainer"
            )

    def keys(self, directory: Path) -> dict[str, Any]:
        """Write the objects into a file of the directory; return the keys of a study file that name them there."""
        for library in ("lightning", "transformers"):
            if (make := getattr(self, library)) is not None:
                return {"from": {library: f"{objects.HERE}:make", "kwargs": objects.keep({"make": make}, directory)}}
        own_loss = {"loss": self.loss} if callable(self.loss) else {}
        handed = {"model": self.model, "train": self.train, "val": self.val, **own_loss}
        kwargs = objects.keep(handed, directory)
        named = {} if own_loss or self.loss is None else {"loss": self.loss}
        return {
            "model": {"target": f"{objects.HERE}:model", "kwargs": kwargs},
            "data": {"target": f"{objects.HERE}:data", "kwargs": kwargs},
            **named,
        }


def find(
    subject: Subject,
    *,
    run_dir: str | Path | None = None,
    stages: Sequence[str | Mapping[str, Any]] | None = None,
    address: str | None = None,
    fresh: bool = False,
    quiet: bool = False,
    **keys: Any,
) -> LoadedStudy:
    """See `batchscout.find`."""
    name = keys.pop("name", None) or _name_of_script()
    where = on_this_machine(run_place_of(str(run_dir or Path("runs") / name)), "batchscout.find").absolute()
    make_private_directory(where)
    tree = {"name": name, **subject.keys(where), **keys}
    if stages is not None:
        tree["stages"] = [{"type": stage} if isinstance(stage, str) else dict(stage) for stage in stages]
    import_from_here()
    config = study_of(tree, "what find was given", say=lambda told: print(f"batchscout: {told}", file=sys.stderr))
    ending = run_study(config, where, address, remeasure=fresh, quiet=quiet)
    if ending.exit_code == 130:
        raise KeyboardInterrupt(ending.message)
    if ending.exit_code == 2:
        raise ValueError(ending.message)
    return load(where)


def _name_of_script() -> str:
    """Return the name of the script that runs, as a study may have it; `notebook` where there is none."""
    name = re.sub(r"[^\w.-]+", "-", Path(sys.argv[0]).stem).strip(".-")
    return "notebook" if name in ("", "ipykernel_launcher", "__main__") else name
