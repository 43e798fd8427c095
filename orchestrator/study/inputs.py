"""What a study file names beside itself: import paths, and files, which are told by what they hold."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.placeholders import leaves
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.criteria import import_path
from batchscout.trainers.files import own_file
from batchscout.trainers.user_code import import_path_of, script_file


def data_files_of(config: StudyConfig) -> dict[str, str]:
    """Return a digest of each file that the study file names, by its key. Those in a folder, or that a default argument names, are not
    among them."""
    named = {"data.kwargs": config.data.kwargs, "model.kwargs": config.model.kwargs}
    values = leaves(named | {"initial_weights": config.initial_weights})
    texts = [(key, text) for key, text in values if isinstance(text, str) and _may_be_a_path(text)]
    return {key: _digest(Path(text)) for key, text in texts if Path(text).is_file()}


def import_paths(config: StudyConfig | TrialConfig) -> list[str | None]:
    """Return what a study or a trial names in code: import paths, and built-in names among them."""
    optimizer = config.optimizer
    made = [import_path_of(one.target, one.kwargs) for one in (config.model, config.data)]
    targets = [*made, import_path(config.loss)]
    return [*targets, optimizer.target, optimizer.param_groups]


def packages_of(targets: Sequence[str | None]) -> list[str]:
    """Return the packages, or modules outside any package, that these import paths begin with; of this program its own two."""
    named = [target.rpartition(":")[0] for target in targets if target and ":" in target]
    modules = [module.split(".") for module in named if script_file(module) is None]
    return sorted({".".join(names[: 2 if names[0] == "batchscout" else 1]) for names in modules})


def sources_of(package: str) -> list[Path]:
    """Return every module of a package; for a module outside any package, every module beside it."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return []
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    inside = (file for folder in folders for file in folder.rglob("*.py"))
    files = inside if folders else Path(found.origin).parent.glob("*.py")
    return sorted(file for file in files if file.is_file())


LONGEST_NAME = 255
"""A text may be no path at all, and the system refuses to look for one with a longer name."""


def _may_be_a_path(text: str) -> bool:
    return "\0" not in text and len(text) < 4096 and all(len(name) <= LONGEST_NAME for name in text.split("/"))


NUM_BLOCKS, BLOCK_BYTES = 64, 2**18
"""What is read of a large file, spread over it: checkpoints of one model differ everywhere, and data are looked at by themselves, too."""


def _digest(path: Path) -> str:
    """Return a digest of a file's size and of what it holds; of a large one of some blocks, its last bytes among them."""
    with own_file(path, "read"), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        for start in (*range(0, size, max(BLOCK_BYTES, size // NUM_BLOCKS)), max(0, size - BLOCK_BYTES)):
            file.seek(start)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]
