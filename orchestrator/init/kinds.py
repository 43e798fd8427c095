"""What the names in a project's files stand for: modules, data sets, trainers, and functions that make them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from batchscout.orchestrator.init.reading import Class, Function, Module


class Kind(Enum):
    MODULE = auto()
    """An nn.Module."""
    LIGHTNING_MODULE = auto()
    LIGHTNING_DATA = auto()
    DATASET = auto()
    """A data set or a loader of one."""
    TRAINER = auto()
    """A Trainer of transformers, or one made of it."""


_KNOWN = {
    Kind.LIGHTNING_MODULE: r"(lightning|pytorch_lightning)(\.pytorch)?\.LightningModule",
    Kind.LIGHTNING_DATA: r"(lightning|pytorch_lightning)(\.pytorch)?\.LightningDataModule",
    Kind.TRAINER: r"(transformers|trl)\.\w*Trainer",
    Kind.DATASET: r"torch\.utils\.data\.(\w*Dataset|Subset|DataLoader)|torchvision\.datasets\.\w+|datasets\.(\w*Dataset(\.\w+)?|load_dataset|load_from_disk)",
    Kind.MODULE: r"torch\.nn\.(Module|Sequential)|transformers\.(\w+(For|Model)\w*|\w*Model)(\.from_\w+)?|torchvision\.models\.\w+",
}
# What is asked of a name may be asked of what it is made of, and so on; a circle of imports must end.
_DEEPEST = 6


@dataclass(frozen=True)
class Project:
    """The files of a folder."""

    modules: tuple[Module, ...]

    def kind_of(self, name: str, depth: int = _DEEPEST) -> Kind | None:
        """Return what a dotted name is, or makes; None where that cannot be told."""
        origin = self._origin(name, depth)
        known = next((kind for kind, pattern in _KNOWN.items() if re.fullmatch(pattern, origin)), None)
        found = self._defined(origin)
        if known is not None or found is None or not depth:
            return known
        if isinstance(found, Class):
            kinds = [self.kind_of(base, depth - 1) for base in found.bases]
            return next((kind for kind in kinds if kind is not None), None)
        return self.kind_of(found.returned[0], depth - 1) if len(found.returned) == 1 else None

    def kinds_made_by(self, function: Function) -> tuple[Kind | None, ...]:
        """Return what each member is of what a function returns."""
        if function.returned == ("torch.utils.data.random_split",):
            return (Kind.DATASET, Kind.DATASET)
        return tuple(self.kind_of(name) if name else None for name in function.returned)

    def _origin(self, name: str, depth: int) -> str:
        """Return the name under which something is defined that files of the project hand on to each other."""
        where, _, own = name.rpartition(".")
        imported = next((module.imported for module in self.modules if module.name == where), {})
        return self._origin(imported[own], depth - 1) if own in imported and depth else name

    def _defined(self, name: str) -> Class | Function | None:
        where, _, own = name.rpartition(".")
        defined = (
            one for module in self.modules if module.name == where for one in (*module.classes, *module.functions)
        )
        return next((one for one in defined if one.name == own), None)

    def classes_of(self, kind: Kind) -> list[tuple[Module, Class]]:
        """Return the classes that are of a kind."""
        return [
            (module, one)
            for module in self.modules
            for one in module.classes
            if self.kind_of(f"{module.name}.{one.name}") is kind
        ]

    def functions(self) -> Sequence[tuple[Module, Function]]:
        return [(module, function) for module in self.modules for function in module.functions]
