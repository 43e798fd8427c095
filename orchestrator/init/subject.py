"""Chooses, among what a project defines, what a study is to be of: pure functions over what was read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from batchscout.orchestrator.init.command import Command
from batchscout.orchestrator.init.kinds import Kind, Project
from batchscout.orchestrator.init.reading import Call, Class, Function, Module
from batchscout.trainers.sources.settings import Settings

_LOSSES = {
    "cross_entropy": r"torch\.nn\.(functional\.cross_entropy|CrossEntropyLoss)",
    "mse": r"torch\.nn\.(functional\.mse_loss|MSELoss)",
    "bce_with_logits": r"torch\.nn\.(functional\.binary_cross_entropy_with_logits|BCEWithLogitsLoss)",
}
# Keys under which a batch has its targets, the likeliest first.
_TARGETS = ("labels", "label", "targets", "target", "y")
_OPTIMIZERS = {"AdamW": "adamw", "Adam": "adamw", "SGD": "sgd", "Muon": "muon", "Adafactor": "adafactor"}


@dataclass(frozen=True)
class Place:
    """Something in a file, as a study file names it and as people find it."""

    target: str
    """The import path, `package.module:callable`."""
    where: str
    """`train.py, line 12`."""
    required: tuple[str, ...] = ()
    """Arguments that it needs."""


@dataclass(frozen=True)
class LossFound:
    """What the loss is taken to be, and why."""

    type: str | None
    """As the key `loss` names it; None where the module returns (loss_sum, num_targets) itself."""
    why: str
    targets: str = "labels"
    """The key of the targets, where a batch is a dictionary."""
    ignore_index: int | None = None
    """What it is called with, if that is not torch's own."""
    unlike: tuple[str, ...] = ()
    """Arguments that it is called with and that the key `loss` does not have."""


@dataclass(frozen=True)
class Hyperparameters:
    """What a script trains with now, as far as it is written down as numbers."""

    optimizer: str | None = None
    lr: float | None = None
    lr_where: str = ""
    batch_size: int | None = None
    batch_where: str = ""


@dataclass(frozen=True)
class FromSubject:
    """An object that trains elsewhere, which a callable makes."""

    library: str
    """lightning or transformers."""
    maker: Place
    is_there: bool = True
    """False where the callable has yet to be written: `to_write` says it."""
    to_write: str = ""


@dataclass(frozen=True)
class OwnSubject:
    """A model and data."""

    model: Place | None
    """None where none was found."""
    data: Place | None
    """None where no callable was found that returns (train, val)."""
    loss: LossFound
    hyperparameters: Hyperparameters
    sets: tuple[Place, ...] = ()
    """Data sets that were found."""
    others: tuple[str, ...] = ()
    """Other models that were found."""


@dataclass(frozen=True)
class WatchedSubject:
    """A script that has run until its second optimizer step."""

    command: Command
    said: Settings
    seconds: float
    """How long that took."""
    loss_unseen: str = ""
    """Why its loss could not be had; empty where it was."""


Subject = FromSubject | OwnSubject | WatchedSubject


def subject_of(project: Project, named: tuple[Module, Class | Function] | None = None) -> Subject:
    """Return what to study. named: what the user has pointed at; without it, what trains elsewhere comes before a model, and a
    callable that makes it before a class."""
    if named is not None:
        return _subject_named(project, *named)
    made = next(_makers(project), None) or next(_unmade(project), None)
    return made or _own(project, _best_model(project), _data_of(project))


def script_of(project: Project) -> tuple[Module, Call] | None:
    """Return the script that trains, with the call that says so: the first one that makes an optimizer or a Trainer."""
    for module in project.modules:
        for call in module.calls if module.is_script else ():
            if (call.name.startswith("torch.optim.") and "lr_scheduler" not in call.name) or project.kind_of(
                call.name
            ) is Kind.TRAINER:
                return module, call
    return None


def place(module: Module, one: Class | Function | Call, name: str = "") -> Place:
    where = f"{module.path.name}, line {one.line}"
    required = one.required if isinstance(one, Class | Function) else ()
    return Place(f"{module.name}:{name or one.name}", where, required)


def _subject_named(project: Project, module: Module, one: Class | Function) -> Subject:
    """Raises ValueError where it cannot be told what a function returns."""
    if isinstance(one, Function) and (made := _made_by(project, module, one)):
        return made
    if isinstance(one, Function) and _makes_data(project, one):
        return _own(project, _best_model(project), place(module, one))
    kind = project.kind_of(f"{module.name}.{one.name}")
    if kind is Kind.LIGHTNING_MODULE and isinstance(one, Class):
        return _lightning_to_write(project, module, one)
    if kind is not Kind.MODULE:
        raise ValueError(
            f"{module.name}:{one.name} ({module.path.name}, line {one.line}) is neither a model, nor data, nor does it say that it returns them; "
            "annotate what it returns (-> nn.Module, -> Trainer, -> tuple[LightningModule, LightningDataModule], or -> tuple[Dataset, Dataset])"
        )
    return _own(project, (module, one), _data_of(project))


def _makers(project: Project) -> Iterator[FromSubject]:
    """Yield the callables that return what trains elsewhere; those without required arguments first."""
    found = [
        (made, function) for module, function in project.functions() if (made := _made_by(project, module, function))
    ]
    yield from (made for made, _ in sorted(found, key=lambda pair: len(pair[1].required)))


def _made_by(project: Project, module: Module, function: Function) -> FromSubject | None:
    kinds = project.kinds_made_by(function)
    if kinds == (Kind.TRAINER,):
        return FromSubject("transformers", place(module, function))
    if len(kinds) in (2, 3, 4) and kinds[0] is Kind.LIGHTNING_MODULE:
        return FromSubject("lightning", place(module, function))
    return None


def _unmade(project: Project) -> Iterator[FromSubject]:
    """Yield what trains elsewhere and is made by no callable yet, with the lines that would do."""
    for module, one in project.classes_of(Kind.LIGHTNING_MODULE):
        yield _lightning_to_write(project, module, one)
    for module in project.modules:
        for call in module.calls:
            if project.kind_of(call.name) is Kind.TRAINER:
                lines = f"def make_trainer():\n    ...                    # what makes the Trainer in line {call.line} now\n    return trainer"
                yield FromSubject("transformers", place(module, call, "make_trainer"), False, lines)


def _lightning_to_write(project: Project, module: Module, one: Class) -> FromSubject:
    """Return a LightningModule with the function that is to return it with its data."""
    data = next(iter(project.classes_of(Kind.LIGHTNING_DATA)), None)
    loaders = f"{data[1].name}()" if data else "FILL_IN_train_loader(), FILL_IN_val_loader()"
    lines = f"def make():\n    return {one.name}(), {loaders}"
    return FromSubject("lightning", replace(place(module, one, "make"), required=()), False, lines)


def _best_model(project: Project) -> tuple[Module, Class | Function] | None:
    """Return the module that is a part of no other one, or else a function that makes one; of several what needs no arguments, in the file
    with the data."""
    found = project.classes_of(Kind.MODULE)
    parts = {name for _, one in found for name in one.made_in_it if not name.endswith(f".{one.name}")}
    whole: Sequence[tuple[Module, Class | Function]] = [
        (module, one) for module, one in found if f"{module.name}.{one.name}" not in parts and one.forward is not None
    ]
    makers = [(module, one) for module, one in project.functions() if project.kinds_made_by(one) == (Kind.MODULE,)]
    data = _data_of(project)
    beside = data.target.split(":")[0] if data else ""
    return min(whole or makers or found, key=lambda pair: (len(pair[1].required), pair[0].name != beside), default=None)


def _data_of(project: Project) -> Place | None:
    found = [(module, function) for module, function in project.functions() if _makes_data(project, function)]
    best = min(found, key=lambda pair: len(pair[1].required), default=None)
    return place(*best) if best else None


def _makes_data(project: Project, function: Function) -> bool:
    """True if it returns two data sets, or two of anything and is named for data."""
    kinds = project.kinds_made_by(function)
    is_named_so = re.search(r"data|samples", function.name) is not None
    return kinds == (Kind.DATASET, Kind.DATASET) or (kinds == (None, None) and is_named_so)


def _own(project: Project, model: tuple[Module, Class | Function] | None, data: Place | None) -> OwnSubject:
    chosen = place(*model) if model else None
    others = [place(module, one).target for module, one in project.classes_of(Kind.MODULE) if one.forward is not None]
    return OwnSubject(
        chosen,
        data,
        _loss_of(project, model),
        _hyperparameters(project),
        tuple(place(module, one) for module, one in project.classes_of(Kind.DATASET)),
        tuple(target for target in others if chosen is None or target != chosen.target),
    )


def _loss_of(project: Project, model: tuple[Module, Class | Function] | None) -> LossFound:
    """Return the loss: the module's own where its `forward` computes one, else the one that the project's files call."""
    if model and (own := _own_loss(*model)):
        return own
    targets = _targets_key(project)
    for module in project.modules:
        for call in module.calls:
            if found := _loss_type(call):
                where = f"{module.path.name}, line {call.line} calls {call.name.rpartition('.')[2]}"
                ignored = call.keywords.get("ignore_index")
                known = {"input", "target"}
                known |= {"reduction"} if call.keywords.get("reduction") == "mean" else set()
                known |= {"ignore_index"} if isinstance(ignored, int) else set()
                unlike = tuple(name for name in (*call.keywords, *call.others) if name not in known)
                return LossFound(found, where, targets, ignored if isinstance(ignored, int) else None, unlike)
    return LossFound("cross_entropy", "no call of a loss was found; cross_entropy takes logits and classes", targets)


def _own_loss(module: Module, one: Class | Function) -> LossFound | None:
    """Return the loss that a module computes itself; None where it returns outputs, as far as that can be told."""
    made_of = one.bases if isinstance(one, Class) else one.returned
    for call in (one.forward if isinstance(one, Class) else None) or ():
        where = f"({module.path.name}, line {call.line})"
        if _loss_type(call) and call.keywords.get("reduction") == "sum":
            return LossFound(None, f"its forward computes a sum {where}: it is to return (loss_sum, num_targets)")
        if _loss_type(call):
            return LossFound("mean", f"its forward computes a mean itself {where}")
    is_of_transformers = any(name.startswith("transformers.") for name in made_of)
    return LossFound("transformers", "it is a model of transformers") if is_of_transformers else None


def _loss_type(call: Call) -> str | None:
    return next((name for name, pattern in _LOSSES.items() if re.fullmatch(pattern, call.name)), None)


def _targets_key(project: Project) -> str:
    keys = [one.item_keys for _, one in project.classes_of(Kind.DATASET) if one.item_keys]
    return next((name for names in keys for name in _TARGETS if name in names), "labels")


def _hyperparameters(project: Project) -> Hyperparameters:
    """Return the first learning rate and batch size that stand in a call as numbers."""
    calls = [(module, call) for module in project.modules for call in module.calls]
    optimizers = [(module, call) for module, call in calls if call.name.startswith("torch.optim.")]
    known = next(((m, c) for m, c in optimizers if c.name.rpartition(".")[2] in _OPTIMIZERS), None)
    rate = _number(optimizers, "lr")
    batch = _number([(m, c) for m, c in calls if c.name == "torch.utils.data.DataLoader"], "batch_size")
    return Hyperparameters(
        _OPTIMIZERS[known[1].name.rpartition(".")[2]] if known else None,
        float(rate[0]) if rate else None,
        rate[1] if rate else "",
        int(batch[0]) if batch else None,
        batch[1] if batch else "",
    )


def _number(calls: Iterable[tuple[Module, Call]], keyword: str) -> tuple[float, str] | None:
    for module, call in calls:
        value = call.keywords.get(keyword)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return value, f"{module.path.name}, line {call.line}"
    return None
