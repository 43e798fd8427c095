"""The page of every key that a study file may have, made of the types that read it and of the words under their fields."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.sources import From
from batchscout.orchestrator.output.schemas.field_texts import texts_under_fields
from batchscout.trainers.strict import Strict

INTRODUCTION = """\
# Every key of a study file

`model` and `data` must be given, or `from` in their place; all else has a default. Unknown keys are refused. `--set optimizer.lr=3e-4`
changes one key from the command line; of a stage it is `--set stages.train.max_runs=5`. Sizes are in samples unless a name says otherwise;
amounts of memory take a unit (`512MiB`), shares a percent sign (`5%`).
"""
OF_THE_FILE = {
    "name": "default: the file's own",
    "model": "must be given, or `from`",
    "data": "must be given, or `from`",
}
"""Keys that must be given to a study, and that its file may have otherwise."""
A_SECTION = "keys of its own"


@dataclass(frozen=True)
class Section:
    """A part of the study file that has keys of its own."""

    place: str
    """Where it stands, as `--set` takes it; empty for the file itself."""
    owner: type[Strict]
    one_of_several: bool = False
    """True if its `type` says which of several kinds stands there."""

    @property
    def title(self) -> str:
        if self.one_of_several:
            return f"`{self.place}: {{type: {self.owner.model_fields['type'].default}}}`"
        return f"`{self.place}`" if self.place else "The file itself"


def page() -> str:
    """Return the page."""
    sections = [*sections_of("", StudyConfig), Section("from", From)]
    return INTRODUCTION + "".join(section_text(section) for section in unlike(sections))


def sections_of(place: str, owner: type[Strict]) -> Iterator[Section]:
    """Yield the section, and those within it."""
    yield Section(place, owner)
    for name, field in owner.model_fields.items():
        within = sections_in(field.annotation)
        for kind in within:
            at = f"{place}.{name}".lstrip(".")
            if name == "stages":
                yield from sections_of(f"{at}.{kind.model_fields['type'].default}", kind)
            elif len(within) > 1:
                yield Section(at, kind, one_of_several=True)
            else:
                yield from sections_of(at, kind)


def sections_in(annotation: object) -> list[type[Strict]]:
    """Return the classes of sections that may stand where this type does."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return [annotation]
    return [kind for part in get_args(annotation) for kind in sections_in(part)]


def unlike(sections: list[Section]) -> Iterator[Section]:
    """Yield each class of sections once, where it first stands."""
    seen: set[type[Strict]] = set()
    for section in sections:
        if section.owner not in seen:
            yield section
        seen.add(section.owner)


def section_text(section: Section) -> str:
    words = documented(section.owner)
    keys = "".join(
        f"\n#### `{(key := f'{section.place}.{name}'.lstrip('.'))}`\n\n"
        f"*{kind_of(field)}* · {OF_THE_FILE.get(key) or default_of(field)}\n\n{prose(words[name])}\n"
        for name, field in section.owner.model_fields.items()
    )
    return f"\n## {section.title}\n\n{prose(inspect.getdoc(section.owner) or '')}\n{keys}"


def prose(text: str) -> str:
    """Return a docstring as Markdown: outside of `code` nothing in it is a sign."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("*", "&#42;").replace("[", "&#91;") for part in parts[::2]]
    return "`".join(parts)


def documented(owner: type[Strict]) -> dict[str, str]:
    """Return what stands under each field, in the class or in one that it is made from."""
    words = texts_under_fields(owner)
    missing = [name for name in owner.model_fields if name not in words]
    assert not missing, f"{owner.__name__} has keys without a word under them: {missing}"
    return words


def default_of(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "must be given"
    if isinstance(field.default, Strict):
        return "default: its keys' own"
    if isinstance(field.default, tuple) and any(isinstance(one, Strict) for one in field.default):
        return f"default: {', '.join(f'`{one.type}`' for one in field.default)}"
    told = list(field.default) if isinstance(field.default, tuple) else field.default
    text = yaml.safe_dump(told, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")
    return f"default `{text}`"


def kind_of(field: FieldInfo) -> str:
    """Return in words what a key takes."""
    found = kinds(field.annotation, tuple(field.metadata))
    one_section = len(sections_in(field.annotation)) == 1
    return " or ".join(
        dict.fromkeys(A_SECTION if kind.startswith("`{type") and one_section else kind for kind in found)
    )


def kinds(annotation: Any, limits: tuple[object, ...] = ()) -> Iterator[str]:
    """Yield each kind of value that a type allows, within its limits."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from kinds(parts[0], (*limits, *parts[1:]))
    elif origin in (Union, UnionType):
        for part in parts:
            yield from kinds(part, limits)
    elif origin is Literal:
        yield ", ".join(f"`{word}`" for word in parts)
    elif origin is tuple:
        yield _list_of(parts) + ("" if not any(isinstance(limit, MinLen) for limit in limits) else ", one at least")
    elif origin is dict:
        yield "keys with values"
    elif annotation is NoneType:
        yield "null"
    elif issubclass(annotation, Strict):
        kind = annotation.model_fields.get("type")
        yield f"`{{type: {kind.default}}}`" if kind else A_SECTION
    else:
        yield _WORDS[annotation] + "".join(_limit_text(limit, annotation) for limit in limits)


def _list_of(parts: tuple[Any, ...]) -> str:
    members = "/".join(dict.fromkeys(kinds(parts[0])))
    return f"a list of {members}" if parts[-1] is Ellipsis else f"a list of {len(parts)}: {members}"


def _limit_text(limit: object, kind: object) -> str:
    match limit:
        case Gt(gt=0) if kind is int:
            return ", at least 1"
        case Gt(gt=bound):
            return f", more than {bound}"
        case Ge(ge=bound):
            return f", at least {bound}"
        case Lt(lt=bound):
            return f", less than {bound}"
        case Le(le=bound):
            return f", at most {bound}"
        case FieldInfo(metadata=within):
            return "".join(_limit_text(one, kind) for one in within)
        case _:
            return ""


_WORDS: dict[object, str] = {
    bool: "`true` or `false`",
    int: "a whole number",
    float: "a number",
    str: "text",
    ByteSize: "an amount of memory",
    Any: "anything",
}
