"""Writes a study file for what was found, with each key's own documentation above it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import Any

import yaml

from batchscout.orchestrator.config.placeholders import PLACEHOLDER
from batchscout.orchestrator.init.subject import (
    FromSubject,
    LossFound,
    OwnSubject,
    Place,
    Subject,
    WatchedSubject,
)
from batchscout.orchestrator.output.schemas import editors_line, schema_path
from batchscout.orchestrator.units import training_time_text
from batchscout.trainers.criteria import IGNORED_TARGET
from batchscout.trainers.files import quoted
from batchscout.trainers.sources.settings import scaled

_WIDTH = 110
_DEFAULT_STAGES = ("frontier", "throughput", "equivalence", "train")
_SHORT_BUDGET = 8192
_RUN_SECONDS = 30.0
"""A study's run may be longer than _SHORT_BUDGET if its passes take no more than this: the nearer it is to the user's own run, the less is
foretold and the more measured."""
_PUT_YOURS = "the default: no value was found in your code; put in the one that you train with"


@dataclass(frozen=True)
class Machine:
    """What the values of a study file depend on."""

    has_gpu: bool
    has_compiler: bool
    """True if torch.compile finds the compiler that it needs."""


@dataclass(frozen=True)
class Written:
    """The text of a study file, and what is left to do."""

    text: str
    to_do: tuple[str, ...]
    """In words; empty where it runs as it is."""


def written(subject: Subject, name: str, file: str, machine: Machine, notes: tuple[str, ...] = ()) -> Written:
    """Return the study file. file: as it is named in the folder in which it is to be used. notes: what else people should know, a sentence each."""
    match subject:
        case WatchedSubject():
            keys, how = list(_watched_keys(subject)), _BY_WATCHING
        case FromSubject():
            keys, how = list(_from_keys(subject)), _BY_READING
        case OwnSubject():
            keys, how = list(_own_keys(subject, machine)), _BY_READING
    to_do = tuple(_to_do(subject))
    head = [
        editors_line(str(schema_path("study"))),
        *_comment(
            "The line above has editors complete and check the keys; its path is this machine's (batchscout schema study)."
        ),
        *_comment(f"Written by batchscout init, {how} {_NOT_YET if to_do else _AS_IT_IS}"),
        *(line for text in (*to_do, *notes) for line in _comment(f"- {text}", "#   ")),
        f"# Then, in {'this folder' if file == PurePath(file).name else 'the folder of your code'}:",
        f"#   batchscout plan {quoted(file)}    # what would run, what is skipped, predicted memory; trains nothing",
        f"#   batchscout run {quoted(file)}     # the study; the same command goes on with one that was interrupted",
        "",
        f"name: {name}",
    ]
    ranks = subject.command.num_processes if isinstance(subject, WatchedSubject) else 1
    return Written("\n".join([*head, *keys, *_shared_keys(machine, ranks), *_stages(machine)]) + "\n", to_do)


_BY_READING = "from reading alone: nothing was run."
_BY_WATCHING = "from watching the script until its second optimizer step; what it changed was undone."
_AS_IT_IS = "Review it: it runs as it is."
_NOT_YET = f"To do before it runs; {PLACEHOLDER} marks what only you know:"


def _to_do(subject: Subject) -> Iterator[str]:
    """Yield what has to be done before the study runs."""
    if isinstance(subject, WatchedSubject):
        if subject.loss_unseen:
            yield f"{subject.loss_unseen}, in place of {PLACEHOLDER}"
        return
    if isinstance(subject, FromSubject):
        if not subject.is_there:
            module = subject.maker.target.split(":")[0]
            yield f"write the function {subject.maker.target.split(':')[1]} into {module}.py ({subject.maker.where}):\n{textwrap.indent(subject.to_write.strip(), '    ')}"
        yield from _arguments_to_fill_in(subject.maker, "from.kwargs")
        return
    if subject.model is None:
        yield f"model.target: name a class or function of yours that makes an nn.Module, as package.module:callable, in place of {PLACEHOLDER}"
    if subject.loss.unlike:
        yield (
            f"loss: {subject.loss.why} with {', '.join(subject.loss.unlike)}, which no built-in loss has; write it as package.module:callable, which "
            f"takes (module, batch) and returns (loss_sum, num_targets), in place of {PLACEHOLDER}"
        )
    if subject.data is None:
        sets = ", ".join(f"{one.target} ({one.where})" for one in subject.sets)
        has = f" The data sets that were found: {sets}." if sets else ""
        yield f"data.target: write a function that returns (train, val), two data sets, and name it as package.module:function in place of {PLACEHOLDER}.{has}"
    for one, key in ((subject.model, "model.kwargs"), (subject.data, "data.kwargs")):
        if one is not None:
            yield from _arguments_to_fill_in(one, key)


def _arguments_to_fill_in(one: Place, key: str) -> Iterator[str]:
    if one.required:
        yield f"{key}: {one.target} needs {', '.join(one.required)}; put their values in place of {PLACEHOLDER}"


def _from_keys(subject: FromSubject) -> Iterator[str]:
    maker = subject.maker
    kwargs = f", kwargs: {_kwargs(maker)}" if maker.required else ""
    found = f"Found in {maker.where}" if subject.is_there else f"To be written (see {maker.where})"
    yield ""
    yield from _comment(f"{_documentation('from')} {found}.")
    yield f'from: {{{subject.library}: "{maker.target}"{kwargs}}}'


def _watched_keys(subject: WatchedSubject) -> Iterator[str]:
    """Yield the script, what was taken of it, and the length of a run."""
    yield ""
    yield from _comment(f"{_documentation('from')} What was found in this one:")
    yield from (f"#   {line}" for line in subject.said.taken)
    command = subject.command
    args = f", args: {json.dumps(list(command.args))}" if command.args else ""
    yield f"from: {{script: {json.dumps(command.script)}{args}}}"
    if subject.loss_unseen:
        yield ""
        yield from _comment(f"{_documentation('loss')} Here: what the script computes between a batch and backward.")
        yield f'loss: "{PLACEHOLDER}"'
    yield ""
    yield "# What it sets of a study; a key here overrides it:"
    keys = {key: value for key, value in subject.said.keys.items() if key not in ("model", "data")}
    yield from (f"#   {line}" for line in yaml.safe_dump(keys, sort_keys=False, width=_WIDTH).splitlines())
    if command.num_processes > 1:
        batch, rate = (subject.said.keys["optimizer"][key] for key in ("reference_batch_size", "lr"))
        yield ""
        yield f"# It is launched as {command.num_processes} processes. One alone took {batch} samples a step, so together they take:"
        yield f"optimizer: {{reference_batch_size: {batch * command.num_processes}}}"
        yield "# A script that divides its batch by the number of processes takes those of one: remove the line above then."
        yield f"# One that multiplies its learning rate by that number was seen at the rate of one, {rate:.4g}: set optimizer.lr to {rate * command.num_processes:.4g} then."
    said = subject.said
    yield ""
    each = None if said.sample_seconds is None else said.sample_seconds / command.num_processes
    yield from _length(scaled(said.run_samples, said.in_steps, command.num_processes), each)


def _length(run_samples: int | None, sample_seconds: float | None) -> Iterator[str]:
    """Yield the length of a run of the study, and that of the script where it is longer. sample_seconds: what a pass takes
    for each sample."""
    budget = max(_SHORT_BUDGET, int(_RUN_SECONDS / sample_seconds)) if sample_seconds else _SHORT_BUDGET
    if run_samples and run_samples <= budget:
        yield from _key("sample_budget", f"{run_samples}", "the run of the script")
        return
    seconds = f", about {training_time_text(budget * sample_seconds)} of passes" if sample_seconds else ""
    yield from _key("sample_budget", f"{budget}", f"for a first answer{seconds}; a longer run tells more")
    if run_samples:
        yield ""
        yield from _comment(f"{_documentation('real_run')} Here: the run of the script.")
        yield f"real_run: {{samples: {run_samples}}}"


def _own_keys(subject: OwnSubject, machine: Machine) -> Iterator[str]:
    """Yield model, loss, data, optimizer, precision and the length of a run."""
    model, data, found = subject.model, subject.data, subject.hyperparameters
    others = f" Also found: {', '.join(subject.others)}." if subject.others else ""
    yield ""
    yield from _comment(f"{_documentation('model.target')} {_found(model)}{others}")
    yield f"model: {_target(model)}"
    yield ""
    yield from _loss_lines(subject.loss)
    yield ""
    yield from _comment(f"{_documentation('data.target')} {_found(data)}")
    yield f"data: {_target(data)}"
    yield ""
    yield "optimizer:"
    if found.optimizer:
        yield from _key("optimizer.type", found.optimizer, "as in your code")
    lr = f"{found.lr:.3e}" if found.lr is not None else _default("optimizer.lr")
    yield from _key("optimizer.lr", lr, f"from {found.lr_where}" if found.lr is not None else _PUT_YOURS)
    size = str(found.batch_size or _default("optimizer.reference_batch_size"))
    yield from _key(
        "optimizer.reference_batch_size", size, f"from {found.batch_where}" if found.batch_size else _PUT_YOURS
    )
    yield ""
    precision = "bfloat16" if machine.has_gpu else "float32"
    yield from _key("precision", precision, "this machine has a GPU" if machine.has_gpu else "")
    yield ""
    yield from _key(
        "sample_budget", f"{_SHORT_BUDGET}", "shorter than usual, for a first answer; a longer run tells more"
    )


def _loss_lines(loss: LossFound) -> Iterator[str]:
    yield from _comment(f"{_documentation('loss')} Here: {loss.why}.")
    ignored = {} if loss.ignore_index in (None, IGNORED_TARGET) else {"ignore_index": loss.ignore_index}
    targets = {} if loss.targets == "labels" or loss.type in ("mean", "transformers") else {"targets": loss.targets}
    if loss.type is None:
        yield "loss: null"
    elif loss.unlike:
        yield f'loss: "{PLACEHOLDER}"'
    elif settings := {**targets, **ignored}:
        yield f"loss: {{type: {loss.type}, {', '.join(f'{key}: {value}' for key, value in settings.items())}}}"
    else:
        yield f"loss: {loss.type}"


def _shared_keys(machine: Machine, num_ranks: int) -> Iterator[str]:
    yield ""
    yield from _key(
        "memory_limit",
        "null",
        "" if machine.has_gpu else "a number, such as 1.5GiB, shows what a smaller machine would do",
    )
    yield ""
    yield from _key("world_size", str(num_ranks), "as it is launched" if num_ranks > 1 else "")


def _stages(machine: Machine) -> Iterator[str]:
    """Yield the usual stages, each with its question."""
    yield ""
    yield from _comment(_documentation("stages"))
    yield "stages:"
    for stage in _DEFAULT_STAGES:
        yield from _comment(_stage(stage)["description"], "  # ")
        if stage != "frontier":
            yield f"  - {{type: {stage}}}"
        elif machine.has_gpu and machine.has_compiler:
            yield from _comment(f"compile: {_documentation('stages.frontier.compile')}", "  # ")
            yield "  - {type: frontier}"
        else:
            why = (
                "on a CPU it takes a minute for each mode"
                if machine.has_compiler
                else "this machine has no compiler for it"
            )
            yield from _comment(
                f"compile: {_documentation('stages.frontier.compile')} Here: nothing, as {why}.", "  # "
            )
            yield "  - {type: frontier, compile: [false]}"


def _key(path: str, value: str, why: str = "") -> Iterator[str]:
    """Yield a key below its documentation and its default. why: what the value was chosen by, where it is not the default."""
    *section, key = path.split(".")
    indent = "  " * len(section)
    here = f" Here: {why}." if why else ""
    yield from _comment(f"{_documentation(path)} Default: {_default(path)}.{here}", f"{indent}# ")
    yield f"{indent}{key}: {value}"


def _found(one: Place | None) -> str:
    return f"Found in {one.where}." if one else "None was found."


def _target(one: Place | None) -> str:
    if one is None:
        return f'{{target: "{PLACEHOLDER}"}}'
    kwargs = f", kwargs: {_kwargs(one)}" if one.required else ""
    return f'{{target: "{one.target}"{kwargs}}}'


def _kwargs(one: Place) -> str:
    return "{" + ", ".join(f"{argument}: {PLACEHOLDER}" for argument in one.required) + "}"


def _comment(text: str, prefix: str = "# ") -> list[str]:
    """Return the text in lines of a comment: its first line broken between words, and others, which are code, as they are."""
    sentence, *code = text.splitlines()
    later = prefix + "  " if text.startswith("- ") else prefix
    lines = textwrap.wrap(
        sentence, _WIDTH, initial_indent=prefix, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
    return [*lines, *(f"{later}{line}".rstrip() for line in code)]


# The documentation of keys, as it is under their fields.


@cache
def _schema() -> dict[str, Any]:
    return json.loads(schema_path("study").read_text())


def _property(path: str) -> Mapping[str, Any]:
    """Return what the schema says of a key; of a stage's key by `stages.TYPE.KEY`."""
    tree = _schema()
    first, *rest = path.split(".")
    if first == "stages" and rest:
        tree, rest = _stage(rest[0]), rest[1:]
    else:
        rest = [first, *rest]
    for key in rest[:-1]:
        tree = _referred_to(tree["properties"][key])
    return tree["properties"][rest[-1]]


def _stage(kind: str) -> dict[str, Any]:
    section, _ = _schema()["properties"]["stages"]["items"]["anyOf"]  # or its type alone
    mapping = section["discriminator"]["mapping"]
    return _schema()["$defs"][mapping[kind].rpartition("/")[2]]


def _documentation(path: str) -> str:
    found = _property(path)
    return found.get("description") or _referred_to(found)["description"]


def _referred_to(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the schema says of a section; of one that may be its type alone, too, as of a whole one."""
    whole = section["anyOf"][0] if "anyOf" in section else section
    return _schema()["$defs"][whole["$ref"].rpartition("/")[2]]


def _default(path: str) -> str:
    default = _property(path)["default"]
    return "null" if default is None else f"{default:g}" if isinstance(default, float) else str(default)
