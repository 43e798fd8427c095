"""What every section of a study file, and a trial's configuration, is: a frozen value that takes nothing for something
else. Loads no torch."""

from __future__ import annotations

import functools
from types import NoneType, UnionType
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator


class Strict(BaseModel):
    """A frozen value; an unknown key is an error, and so is a truth value for a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, values: object) -> object:
        """Refuse what pydantic reads as 1 and 0."""
        if isinstance(values, dict):
            for name, value in values.items():
                members = value if isinstance(value, list | tuple) else [value]
                wrong = next((one for one in members if isinstance(one, bool)), None)
                if wrong is not None and name in _numbers(cls):
                    has = "is" if wrong is value else "has"
                    raise ValueError(f"{name} {has} {str(wrong).lower()}, which is no number; write the number")
        return values


@functools.cache
def _numbers(keys: type[Strict]) -> frozenset[str]:
    """Return the keys whose value is a number, a list of numbers, or null."""
    return frozenset(name for name, field in keys.model_fields.items() if _is_number(field.annotation))


def _is_number(annotation: object) -> bool:
    if get_origin(annotation) is Annotated:
        return _is_number(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType, tuple):
        return all(part in (NoneType, ...) or _is_number(part) for part in get_args(annotation))
    return isinstance(annotation, type) and issubclass(annotation, int | float) and annotation is not bool
