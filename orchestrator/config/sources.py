"""The key `from` of a study file: an object that trains elsewhere, in place of `model`, `data` and `loss`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field, model_validator

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.trainers.before.source import Library, Source, read_source
from batchscout.trainers.sources.settings import Settings, scaled
from batchscout.trainers.strict import Strict

LONGEST_BY_DEFAULT: int = StudyConfig.model_fields["sample_budget"].default
NAMED_BY_IT = ("loss", "data")
"""Keys of a study file that `from` stands for. Of `model` it leaves `blocks` open, and of a script the loss."""


def _as_typed(argument: object) -> object:
    """Return a number as a shell would pass it on."""
    is_number = isinstance(argument, int | float) and not isinstance(argument, bool)
    return str(argument) if is_number else argument


Argument = Annotated[str, BeforeValidator(_as_typed, json_schema_input_type=str | float)]


class From(Strict):
    """What trains elsewhere, as it is: `{lightning: "my.module:make"}` or `{transformers: "my.script:make_trainer"}`. What it says of
    optimizer, schedule, clipping, precision and batch are defaults: a key of the study file comes first. Every run calls the
    callable anew, so that its model begins from the run's seed."""

    lightning: str | None = None
    """A callable, as `package.module:callable`, that returns what Lightning's `Trainer.fit` is called with: (model, train_loader,
    val_loader) or (model, datamodule), or (model,) if it has both loaders itself; with the Trainer as the last if there is one."""
    transformers: str | None = None
    """A callable, as `package.module:callable`, that returns a Trainer of transformers or an SFTTrainer of trl."""
    script: str | None = None
    """A script, as `train.py`, or a module as `python -m` takes it. It runs until its second optimizer step, and is looked at: its model,
    data, loss and recipe are studied. What it changes is undone. A `loss` beside it is used in place of the script's."""
    args: tuple[Argument, ...] = ()
    """The arguments of the script."""
    kwargs: dict[str, Any] = Field(default={})
    """Arguments of the callable."""
    num_targets: str | None = None
    """What its loss is a mean over: targets, samples, or a callable that takes a batch and returns the number, as
    `package.module:callable`. null: a Trainer counts them itself, and of any other loss it is tried which of the two adds up."""

    @model_validator(mode="after")
    def _names_one(self) -> From:
        named = [name for name in get_args(Library) if getattr(self, name) is not None]
        if len(named) != 1:
            raise ValueError(
                f"from names {' and '.join(named) or 'nothing'}; name one of {', '.join(get_args(Library))}"
            )
        if self.args and self.script is None:
            raise ValueError("from.args are those of a script; give a callable its arguments as kwargs")
        if self.kwargs and self.script is not None:
            raise ValueError("from.kwargs are those of a callable; give a script its arguments as args")
        return self

    def source(self, *, own_loss: bool) -> Source:
        """Return what is read. own_loss: whether the study file has a loss."""
        if self.script is not None:
            own = {"own_loss": True} if own_loss else {}
            return Source("script", self.script, {"args": list(self.args), **own}, self.num_targets)
        library: Library = "lightning" if self.lightning else "transformers"
        return Source(library, self.lightning or self.transformers or "", self.kwargs, self.num_targets)


def with_source(tree: Mapping[str, Any], say: Callable[[str], object]) -> dict[str, Any]:
    """Return a study file's keys with what the object under `from` says, where it has one.

    say: tells people where the study file differs from the object. Raises ValueError where the object cannot be made, or cannot be honoured.
    """
    if "from" not in tree:
        return dict(tree)
    given = {key: value for key, value in tree.items() if key != "from"}
    named = From.model_validate(tree["from"])
    _refuse_two_names(given, named)
    source = named.source(own_loss=given.get("loss") is not None)
    said = read_source(source)
    for sentence in (*said.told, *_changed(said, given)):
        say(f"from {source.library} {source.target}: {sentence}")
    keys = _merged({**said.keys, **_length(_run_samples(said, given))}, given)
    return {**keys, "batch": _batch(_own_batch(keys), given.get("batch"), keys.get("world_size", 1))}


def _run_samples(said: Settings, given: Mapping[str, Any]) -> int | None:
    """Return the samples of the object's own run, whose steps take as many as the study file says."""
    own = said.keys["optimizer"]["reference_batch_size"]
    batch = _given_batch(given) or own
    return scaled(said.run_samples, said.in_steps, batch / own) if isinstance(batch, int) else said.run_samples


def _given_batch(given: Mapping[str, Any]) -> Any:
    optimizer = given.get("optimizer")  # which may be anything: what is wrong is refused later
    return optimizer.get("reference_batch_size") if isinstance(optimizer, Mapping) else None


def _own_batch(keys: Mapping[str, Any]) -> dict[str, int]:
    """Return the key `batch` for the batch that the learning rate is given for, in the object's own micro-batches or the largest smaller ones
    that divide it among the ranks; nothing where the ranks do not divide it."""
    batch, num_ranks = keys["optimizer"]["reference_batch_size"], keys.get("world_size", 1)
    if not isinstance(batch, int) or num_ranks not in range(1, max(batch, 1) + 1) or batch % num_ranks:
        return {}  # what is no number is refused with the others
    of_rank = batch // num_ranks
    most = min(keys["batch"]["micro_batch_size"], of_rank)
    size = next(size for size in range(most, 0, -1) if of_rank % size == 0)
    return {"micro_batch_size": size, "effective_batch_size": batch}


def _batch(own: Mapping[str, int], given: Any, num_ranks: int) -> Any:
    """Return the key `batch` of both: where the file gives the split alone, the effective batch stays the object's own."""
    if not given or not own or not isinstance(given, Mapping):
        return given or own
    effective, accumulation = own["effective_batch_size"], given.get("gradient_accumulation_steps")
    if accumulation is None:
        return {"effective_batch_size": effective, **given}
    if given.get("micro_batch_size") or not isinstance(accumulation, int) or effective % (accumulation * num_ranks):
        return given
    return {"micro_batch_size": effective // (accumulation * num_ranks), **given}


def _length(run_samples: int | None) -> dict[str, int]:
    """Return the samples of a full run: as many as the object's own, up to what a study takes where nobody says it."""
    return {} if run_samples is None else {"sample_budget": min(run_samples, LONGEST_BY_DEFAULT)}


def _changed(said: Settings, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield where the study file differs from the object: in its length, and in keys that override the object's own."""
    run_samples, ranks = _run_samples(said, given), given.get("world_size", 1)
    budget = given.get("sample_budget") or min(run_samples or LONGEST_BY_DEFAULT, LONGEST_BY_DEFAULT)
    if run_samples is not None and run_samples != budget and given.get("real_run") is None:
        yield (
            f"its run takes {run_samples:,} samples, and full runs of the study {budget:,}, with its schedule over that length"
            + (f"; real_run: {{samples: {run_samples}}} carries the answer to its own" if run_samples > budget else "")
        )
    own = said.keys["optimizer"]["reference_batch_size"]
    if said.processes != 1 and ranks != said.processes:
        yield (
            f"its Trainer has {said.processes} processes, which together take {own} samples a step, and world_size is {ranks}: that is how speeds and "
            f"memory are measured, and what is exported; set world_size: {said.processes} for its own"
        )
    elif said.processes == 1 and ranks != 1 and isinstance(ranks, int) and not _given_batch(given):
        yield (
            f"its {own} samples a step are taken for those of all {ranks} ranks together; where each process of yours takes so many, set "
            f"optimizer: {{reference_batch_size: {own * ranks}}}"
        )
    schedule = said.keys.get("schedule") or {}
    if (
        (_given_batch(given) or own) != own
        and not said.in_steps
        and schedule.get("type") == "table"
        and "schedule" not in given
    ):
        yield (
            f"its schedule was followed over the steps of {own} samples each; with {_given_batch(given)} a step there are fewer, and what it counts in "
            "steps, such as a warm-up, is a larger share of them: set schedule and optimizer.warmup for that"
        )
    for key, value in given.items():
        own = said.keys.get(key)
        parts = (
            [(f"{key}.{part}", one, own.get(part)) for part, one in value.items()]
            if isinstance(value, dict) and isinstance(own, dict)
            else [(key, value, own)]
        )
        for name, one, before in parts:
            if before is not None and one != before:
                yield f"{name} is {one} in the study file, and {before} in it"


def _refuse_two_names(given: Mapping[str, Any], named: From) -> None:
    stands_for = ("data",) if named.script is not None else NAMED_BY_IT
    twice = [key for key in stands_for if given.get(key) is not None]
    model = given.get("model")
    if isinstance(model, dict) and set(model) - {"blocks"}:
        twice.append("model")
    if twice:
        raise ValueError(
            f"the study file has from and {' and '.join(twice)}, which from stands for; leave one of them out"
        )


def _merged(said: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of both, those of sections one by one. An optimizer or a schedule that the study file names is its own alone."""
    sections = {
        key: {**value, **given[key]} if isinstance(value, dict) and isinstance(given.get(key), dict) else value
        for key, value in said.items()
    }
    own, optimizer, schedule = said["optimizer"], given.get("optimizer"), given.get("schedule")
    if isinstance(optimizer, dict) and ({"type", "target"} & optimizer.keys()):
        kept = ("lr", "reference_batch_size", "max_gradient_norm", "warmup")
        own = {key: value for key, value in own.items() if key in kept}
    if isinstance(schedule, dict) and schedule.get("type") not in (None, said.get("schedule", {}).get("type")):
        sections["schedule"] = schedule
        own = {key: value for key, value in own.items() if key != "warmup"}  # it belongs to the schedule of the object
    sections["optimizer"] = {**own, **(optimizer if isinstance(optimizer, dict) else {})}
    return {**given, **sections, **{key: value for key, value in given.items() if not isinstance(value, dict)}}
