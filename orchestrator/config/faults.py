"""Says what is wrong with a study file in the user's words: where, what stands there, what may stand there, and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, get_args, get_origin

from pydantic_core import ErrorDetails

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.sources import From
from batchscout.orchestrator.config.stages import Pruner, StageConfig
from batchscout.orchestrator.units import shortened
from batchscout.trainers.criteria import LossByType
from batchscout.trainers.strict import Strict

Place = tuple[int | str, ...]
"""The place of something in a study file: the keys, list numbers and `type` words on the way to it."""
MOST_OF_A_VALUE = 80


def fault_lines(items: Sequence[ErrorDetails], within: Place = ()) -> Iterator[str]:
    """Yield a line for each place at which something is wrong. within: the place that the faults' own places begin at."""
    placed = [(spoken_place(place := (*within, *item["loc"])), place, item) for item in _own_faults(items)]
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
            return f"{at}no such key; {_instead(str(place[-1]), _known_keys(place))}"
        case "missing" if isinstance(place[-1], int):
            return f"{at}the list ends before it; {_such_as(place[:-1]) or 'add it'}"
        case "missing":
            return f"{at}is missing; add it"
        case "union_tag_not_found":
            choice = Pruner if place[-1] == "pruner" else StageConfig
            return f"{at}has no type; add one of {', '.join(_members_by_type(choice))}"
        case "value_error":
            return f"{at}{message}"
        case _:
            taken = " or ".join(dict.fromkeys(map(_taken, items)))
            return f"{at}it is {_value(first)}, and takes {taken}; {_such_as(place) or _remedy(items)}"


def _such_as(place: Place) -> str | None:
    """Return the remedy where a list of so many members stands, such as a pair; None elsewhere."""
    _, owner = _walked(place[:-1])
    field = owner.model_fields.get(str(place[-1])) if owner else None
    if field is None or get_origin(field.annotation) is not tuple or ... in get_args(field.annotation):
        return None
    return f"write {len(field.default)} members, such as {list(field.default)}"


def _taken(item: ErrorDetails) -> str:
    """Return what may stand where something else does."""
    context: dict[str, Any] = item.get("ctx", {})
    match item["type"]:
        case "tuple_type" | "list_type":
            return "a list"
        case "too_short" | "too_long":
            return f"{'at least' if item['type'] == 'too_short' else 'at most'} {_counted(item)}"
        case "string_type":
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


def _remedy(items: Sequence[ErrorDetails]) -> str:
    kinds, value = {item["type"] for item in items}, items[0]["input"]
    words = [word for item in items for word in _words(item)]
    given = value.get("type") if isinstance(value, dict) else value
    if isinstance(given, str) and (near := difflib.get_close_matches(given, words, n=1)):
        return f"did you mean {near[0]}?"
    if kinds & {"byte_size", "byte_size_unit"}:
        return "write 512MiB or 1.5GiB"
    if kinds & {"tuple_type", "list_type"} and not isinstance(value, dict):
        return f"write [{_yaml(value)}]" if value is not None else "write it in brackets, or leave the key out"
    if kinds & {"model_type", "model_attributes_type", "dict_type"}:
        return "write them below it, or in braces"
    if value is None:
        return "give it a value, or leave the key out"
    return "add one" if kinds == {"too_short"} else "change it"


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


def _instead(word: str, known: Sequence[str]) -> str:
    """Return what could stand in the place of a key that does not exist."""
    if not known:
        return "remove it"
    near = difflib.get_close_matches(word, known, n=1)
    if near and len(known) > MOST_KEYS_TOLD:
        return f"did you mean {near[0]}? batchscout schema study names all {len(known)} keys"
    return (f"did you mean {near[0]}? The" if near else "the") + f" keys here are: {', '.join(known)}"


def _known_keys(place: Place) -> list[str]:
    """Return the keys that are possible where an unknown one was found."""
    _, owner = _walked(place[:-1])
    return list(owner.model_fields) if owner else []


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


_BY_TYPE = _members_by_type(StageConfig) | _members_by_type(Pruner) | _members_by_type(LossByType)
