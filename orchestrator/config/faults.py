"""Says what is wrong with a study file in the user's words: where, what stands there, what may stand there, and the remedy."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, get_args, get_origin

from pydantic_core import ErrorDetails

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.sources import From
from batchscout.orchestrator.config.stages import Pruner, StageConfig
from batchscout.orchestrator.units import counted, shortened
from batchscout.trainers.criteria import LossByType
from batchscout.trainers.strict import Strict

Place = tuple[int | str, ...]
"""The place of something in a study file: the keys, list numbers and `type` words on the way to it."""
MOST_OF_A_VALUE = 80


def fault_lines(items: Sequence[ErrorDetails], within: Place = ()) -> Iterator[str]:
    """Yield a line for each place at which something is wrong. within: the place that the faults' own places begin at."""
    placed = [(spoken_place(place := (*within, *item["loc"])), place, item) for item in _own_faults(items)]
    meant = {_meant_key(place) for _, place, item in placed if item["type"] == "extra_forbidden"}
    # What is there by another name is not missing.
    placed = [one for one in placed if one[2]["type"] != "missing" or one[0] not in meant]
    for where, group in groupby(placed, key=lambda found: found[0]):
        (_, place, first), *others = group
        yield _line(where, place, [first, *(item for _, _, item in others)])


def spoken_place(place: Place) -> str:
    """Return a place as `--set` takes it: a stage by its type, and nothing of the kinds of value that pydantic has tried there."""
    return ".".join(_walked(place)[0])


def _walked(place: Place) -> tuple[list[str], type[Strict] | None]:
    """Return the words of a place, and the class of the section that it leads to; None where that is none."""
    words: list[str] = []
    owner: type[Strict] | None = From if place[:1] == ("from",) else StudyConfig
    for before, part in zip((None, *place), place, strict=False):
        if isinstance(part, int):
            words.append(str(part))
        elif owner is not None and part in owner.model_fields:
            words.append(part)
            owner = _section_of(owner.model_fields[part].annotation)
        elif part in _BY_TYPE and (isinstance(before, int) or owner is None):
            words[-1] = part if isinstance(before, int) else words[-1]
            owner = _BY_TYPE[part]
        elif owner is not None:  # an unknown key, or `from` itself
            words.append(part)
    return words, owner


def _line(where: str, place: Place, items: Sequence[ErrorDetails]) -> str:
    """Return what is wrong at one place; of several items, each is about another kind of value that may stand there."""
    first = items[0]
    at = f"{where}: " if where else ""
    message = first["msg"].removeprefix("Value error, ")
    match first["type"]:
        case "extra_forbidden":
            meant = _meant_key(place)
            remedy = (
                f"write {meant}{NOTES.get(meant.partition(': ')[0], '')}"
                if meant
                else _instead(str(place[-1]), _keys_beside(place))
            )
            return f"{at}no such key; {remedy}"
        case "missing" if isinstance(place[-1], int):
            return f"{at}the list ends before it; {_such_as(place[:-1], None) or 'add it'}"
        case "missing":
            return f"{at}is missing; add it"
        case "union_tag_not_found":
            choice = Pruner if place[-1] == "pruner" else StageConfig
            members = _members_by_type(choice)
            if isinstance(first["input"], dict) and (named := [word for word in first["input"] if word in members]):
                return f"{at}has no type; write type: {named[0]} beside its keys"
            return f"{at}has no type; add one of {', '.join(members)}"
        case "value_error":
            return f"{at}{message}"
        case _:
            taken = " or ".join(dict.fromkeys(map(_taken, items)))
            return f"{at}it is {_value(first)}, and takes {taken}; {_such_as(place, first['input']) or _remedy(place, items)}"


_NUMBERS = ("device_hours", "samples", "effective_batch_size")
MAIN_KEYS = {str: ("type", "target"), int: _NUMBERS, float: _NUMBERS}
"""Of a section, the one that a word or a number in its place is meant for."""
_ON_THE_HUB = {
    "model": (("gpt", "hf"), "name: {}, pretrained: true"),
    "data": (("python_stdlib", "text", "hf", "chat"), "path: {}"),
}
"""Of a section with a target: which are built in, and how hf takes any other name."""
_HOURS = {"h": 1.0, "m": 1 / 60, "min": 1 / 60, "d": 24.0, "": 1.0}
"""By the units of a time, as in `budget=2h`."""


def _such_as(place: Place, value: object) -> str | None:
    """Return the remedy where a list of so many members stands, such as a pair, a list of seeds, or a section; None elsewhere."""
    (_, owner), (_, section) = _walked(place[:-1]), _walked(place)
    full = _in_full(place, value)
    if place == ("seeds",) and isinstance(value, str):
        return "write whole numbers, such as [0, 1, 2]"
    if place == ("seeds",) and isinstance(value, int) and value > 0:
        return f"for {counted(value, 'seed')} write {full}, and for the seed {value} alone [{value}]"
    if full:
        return f"write {full}"
    if section is not None and isinstance(value, str) and "device_hours" in section.model_fields:
        return "write the hours, such as {device_hours: 2}"
    field = owner.model_fields.get(str(place[-1])) if owner else None
    if field is None or get_origin(field.annotation) is not tuple or ... in get_args(field.annotation):
        return None
    return f"write {len(field.default)} members, such as {list(field.default)}"


def _in_full(place: Place, value: object) -> str | None:
    """Return what a word or a number in place of a section or a list stands for, as it is written; None where it stands for nothing."""
    section = _walked(place)[1]
    if place == ("seeds",) and isinstance(value, int):
        first = range(min(value, 3)) if value > 0 else [value]
        return f"[{', '.join(map(str, first))}{', ...' if value > 3 else ''}]"
    if place == ("stages",) and isinstance(value, dict) and value.keys() <= STAGES.keys():
        beside = ", with the keys of each beside its type" if any(value.values()) else ""
        return f"[{', '.join(f'{{type: {name}}}' for name in value)}]{beside}"
    if section is None:
        return None
    if isinstance(value, str) and value in section.model_fields:
        return f"{{{value}: ...}}"
    if isinstance(value, str) and "device_hours" in section.model_fields:
        time = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", value)
        return f"{{device_hours: {float(time[1]) * _HOURS[time[2]]:g}}}" if time and time[2] in _HOURS else None
    built_in, kwargs = _ON_THE_HUB.get(str(place[-1]), ((), ""))
    if isinstance(value, str) and kwargs and value not in built_in and ":" not in value:
        return f"{{target: hf, kwargs: {{{kwargs.format(value)}}}}}"
    key = next((key for key in MAIN_KEYS.get(type(value), ()) if key in section.model_fields), None)
    given = int(value) if isinstance(value, float) and value.is_integer() else value
    return f"{{{key}: {given}}}" if key else None


def as_option(word: str, value: str) -> str | None:
    """Return the --set that an option which is called as a key was meant for; None where no key is called so."""
    place = _in_our_words(word, list(StudyConfig.model_fields), "")
    if place is None or place.startswith("-") or " or " in place:
        return None
    place, _, implied = place.partition(": ")
    full = _in_full((place,), int(value) if value.isdecimal() else value) or ""
    if only := re.fullmatch(r"\{(\w+): ([^{}]+)\}", full):
        place, full = f"{place}.{only[1]}", only[2]
    full = f"[{value}]" if word == "seed" else full
    note = NOTES.get(place, "") if word in OUR_WORDS and word != "seed" else ""
    in_samples = "SAMPLES" if "in samples" in note else ""
    override = f"{place}={implied or in_samples or full or value or '...'}"
    return f"write --set {shlex.quote(override)}{note}"


def _taken(item: ErrorDetails) -> str:
    """Return what may stand where something else does."""
    context: dict[str, Any] = item.get("ctx", {})
    match item["type"]:
        case "tuple_type" | "list_type":
            return "a list"
        case "too_short" | "too_long":
            return f"{'at least' if item['type'] == 'too_short' else 'at most'} {_counted(item)}"
        case "string_type" | "invalid_key":
            return "text"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "keys of its own"
        case "literal_error" | "union_tag_invalid":
            return _listed(_words(item))
        case "int_type" | "int_parsing" | "int_from_float" | "int_parsing_size":
            return "a whole number"
        case "float_type" | "float_parsing":
            return "a number"
        case "finite_number":
            return "a finite number"
        case "bool_type" | "bool_parsing":
            return "true or false"
        case "byte_size" | "byte_size_unit":
            return "an amount of memory"
        case "greater_than" | "less_than":
            bound = context.get("gt", context.get("lt"))
            return f"{'more' if item['type'] == 'greater_than' else 'less'} than {_number(bound)}"
        case "greater_than_equal" | "less_than_equal":
            bound = context.get("ge", context.get("le"))
            return f"at {'least' if item['type'] == 'greater_than_equal' else 'most'} {_number(bound)}"
        case _:
            return f"something else ({item['msg']})"


def _number(bound: Any) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _remedy(place: Place, items: Sequence[ErrorDetails]) -> str:
    kinds, value = {item["type"] for item in items}, items[0]["input"]
    words = [word for item in items for word in _words(item)]
    given = value.get("type") if isinstance(value, dict) else value
    if isinstance(given, str | int) and (meant := _meant(given, words)):
        return meant
    if kinds & {"byte_size", "byte_size_unit"}:
        return "write 512MiB or 1.5GiB"
    if kinds & {"tuple_type", "list_type"} and not isinstance(value, dict):
        return (
            f"write [{value if isinstance(value, str) else _yaml(value)}]"
            if value is not None
            else "write it in brackets, or leave the key out"
        )
    if kinds & {"tuple_type", "list_type"}:
        return "write a list, each member after a dash"
    if kinds & {"model_type", "model_attributes_type", "dict_type"}:
        return "write them below it, or in braces"
    if value is None:
        return "give it a value, or leave the key out"
    if kinds & {"too_short", "too_long"}:
        return "add one" if kinds == {"too_short"} else "leave the others out"
    if kinds & {"string_type", "invalid_key"}:
        return f"write '{value}'"
    return _number_meant(place, items)


def _number_meant(place: Place, items: Sequence[ErrorDetails]) -> str:
    """Return the remedy for what is no number, or none that may stand there."""
    (kind, *_), value = [item["type"] for item in items], items[0]["input"]
    note, whole = NOTES.get(spoken_place(place), ""), any(item["type"].startswith("int_") for item in items)
    if whole and (short := re.fullmatch(r"(\d[\d,_]*\.?\d*)([km])?", str(value).lower())):
        number = float(re.sub("[,_]", "", short[1])) * {None: 1, "k": 1e3, "m": 1e6}[short[2]]
        if number.is_integer() or not note:
            return f"write {number:.0f}"
    if whole and note and re.match(r"[\d.]", str(value)):
        return f"write a whole number{note}"
    if any(_words(item) or item["type"].startswith("bool") for item in items):
        return "write one of these"
    if _taken(items[0]) == "less than 1" and isinstance(value, int | float) and 1 < value < 100:
        return f"for {value:g}% write {value / 100:g}"
    if kind.startswith(("greater", "less")) and value == value:  # nan is neither too small nor too large
        return "raise it" if kind.startswith("greater") else "lower it"
    return "write it in digits"


def _meant(given: str | int, words: Sequence[str]) -> str | None:
    """Return which of the words was meant; None where none is like it."""
    if given == "linear" and "table" in words:
        return "a straight fall is {type: table, factors: [1, 0]}, with optimizer.warmup: 0"
    spoken = _yaml(given) if isinstance(given, int) else given
    if (ours := OUR_WORDS.get(spoken)) in words:
        return f"write {ours}"
    short = [word for word in words if "_" in word and spoken.lower() == "".join(part[0] for part in word.split("_"))]
    near = short or difflib.get_close_matches(spoken.lower(), words, n=1)
    return f"did you mean {near[0]}?" if near else None


def _counted(item: ErrorDetails) -> str:
    context: dict[str, Any] = item.get("ctx", {})
    number = context.get("min_length", context.get("max_length"))
    return "one member" if number == 1 else f"{number} members"


def _words(item: ErrorDetails) -> list[str]:
    """Return the words that may stand at a place, if it takes words."""
    context: dict[str, Any] = item.get("ctx", {})
    said = str(context.get("expected") or context.get("expected_tags"))
    takes_words = item["type"] in ("literal_error", "union_tag_invalid")
    return [word.strip().strip("'") for word in said.replace(" or ", ", ").split(",")] if takes_words else []


def _listed(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _value(item: ErrorDetails) -> str:
    """Return what stands there, as it is written; of a section whose type is wrong, the type."""
    value = item["input"]
    if item["type"] == "union_tag_invalid" and isinstance(value, dict):
        return f"of the type {_yaml(value.get('type'))}"
    return _yaml(value)


def _yaml(value: object) -> str:
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    return shortened(repr(value), MOST_OF_A_VALUE)


def _own_faults(items: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Return the faults, without lists that are called too short only because one of their members is at fault."""

    def a_member_is_at_fault(place: Place) -> bool:
        return any(item["loc"] != place and item["loc"][: len(place)] == place for item in items)

    return [item for item in items if item["type"] != "too_short" or not a_member_is_at_fault(item["loc"])]


MOST_KEYS_TOLD = 20
"""More would bury the key that was meant."""


OUR_WORDS = {
    "learning_rate": "lr", "batch_size": "effective_batch_size", "global_batch_size": "effective_batch_size",
    "train_batch_size": "effective_batch_size", "per_device_train_batch_size": "micro_batch_size", "epochs": "sample_budget",
    "num_epochs": "sample_budget", "max_epochs": "sample_budget", "num_train_epochs": "sample_budget", "steps": "sample_budget",
    "num_steps": "sample_budget", "max_steps": "sample_budget", "train_steps": "sample_budget", "scheduler": "schedule",
    "lr_scheduler": "schedule", "dtype": "precision", "mixed_precision": "precision", "fp32": "float32", "fp16": "float16",
    "bf16": "bfloat16", "grad_clip": "max_gradient_norm", "max_grad_norm": "max_gradient_norm", "num_seeds": "seeds", "seed": "seeds",
    "grad_accum": "gradient_accumulation_steps", "accumulate_grad_batches": "gradient_accumulation_steps",
    "gradient_checkpointing": "activation_checkpointing", "gpus": "world_size", "num_gpus": "world_size", "devices": "world_size",
    "warmup_ratio": "warmup", "warmup_steps": "warmup", "hours": "device_hours", "bf16-mixed": "bfloat16", "16-mixed": "float16",
    "16": "float16", "32": "float32", "true": "full", "false": "none",
}  # fmt: skip
"""What other trainers call a key, or a word of a key's."""
ELSEWHERE = {
    "bf16": "precision: bfloat16", "fp16": "precision: float16", "output_dir": "--dir RUN_DIR on the command line",
    **dict.fromkeys(("seq_len", "max_seq_len", "max_seq_length", "max_length", "block_size"), "data.kwargs.seq_len"),
    "momentum": "optimizer.betas: [0.9, 0.95]",
}  # fmt: skip
"""What is written for a key of other trainers that is no key of ours by another name."""
_IN_SAMPLES = " (in samples: epochs x training samples, steps x batch)"
NOTES = {
    "sample_budget": _IN_SAMPLES, "real_run.samples": _IN_SAMPLES, "optimizer.warmup": " (in samples: steps x batch, a share x sample_budget)",
    "world_size": ", the GPUs of one trial, or placement.lanes, the trials at once", "seeds": ", a list such as [0, 1, 2]",
    "model.kwargs.name": ", with model.target: hf", "data.kwargs.seq_len": ", where data.target takes it",
    "optimizer.betas": ", whose first is SGD's momentum",
}  # fmt: skip
"""What else whoever meant a key by another word has to know."""


def _keys_beside(place: Place) -> list[str]:
    owner = _walked(place[:-1])[1]
    return list(owner.model_fields) if owner else []


def _meant_key(place: Place) -> str | None:
    """Return what is written in place of a key that does not exist; None where nothing is known to be meant."""
    return _in_our_words(str(place[-1]), _keys_beside(place), spoken_place(place[:-1]))


def _in_our_words(word: str, known: Sequence[str], within: str) -> str | None:
    """Return the key that another trainer calls so, or that stands elsewhere in a study file; None where there is none. within: where it
    was found."""
    if word == "name" and "type" in known:
        return f"{within}.type"
    if word in ELSEWHERE:
        return ELSEWHERE[word]
    key = OUR_WORDS.get(word, word)
    key = "samples" if key == "sample_budget" and "samples" in known else key
    sections = {name: _section_of(field.annotation) for name, field in StudyConfig.model_fields.items()}
    if key in known:
        return f"{within}.{key}" if within else key
    if key in sections and key != "name":
        return key
    stages = {f"stages.{name}": stage for name, stage in STAGES.items()}
    places = [f"{name}.{key}" for name, one in (sections | stages).items() if one and key in one.model_fields]
    if places and not places[0].startswith("stages."):
        return places[0]
    if within in _ON_THE_HUB and not difflib.get_close_matches(word, known, n=1):  # an argument of the target
        return f"{within}.kwargs.{word}"
    return _listed(places) or None


def _instead(word: str, known: Sequence[str]) -> str:
    """Return what could stand in the place of a key that does not exist."""
    if not known:
        return "remove it"
    near = difflib.get_close_matches(word, known, n=1)
    if near and len(known) > MOST_KEYS_TOLD:
        return f"did you mean {near[0]}? batchscout schema study names all {len(known)} keys"
    return (f"did you mean {near[0]}? The" if near else "the") + f" keys here are: {', '.join(known)}"


def _section_of(annotation: object) -> type[Strict] | None:
    """Return the class of a key that has keys of its own, and may be null; None where its `type` has to tell."""
    kinds = [
        kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and issubclass(kind, Strict)
    ]
    return kinds[0] if len(kinds) == 1 else None


def _members_by_type(choice: object) -> dict[str, type[Strict]]:
    """Return the members of a union of classes, by the word that each has under `type`."""
    union, _ = get_args(choice)
    return {member.model_fields["type"].default: member for member in get_args(union)}


STAGES = _members_by_type(StageConfig)

_BY_TYPE = STAGES | _members_by_type(Pruner) | _members_by_type(LossByType)
