"""Findings of a stage: how they become JSON for the journal, and the stage's own type again."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Protocol, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from batchscout.orchestrator.study.state import Conclusion, Study


class Findings(Protocol):
    """A frozen dataclass: what one stage hands on to later stages, the recommendation and the report."""

    STAGE: ClassVar[str]
    """The type of the stage that finds it."""


Found = TypeVar("Found", bound=Findings)


def concluded(findings: Findings, reason: str, notes: tuple[str, ...] = (), *, ok: bool = True) -> Conclusion:
    """Return the conclusion of a stage that found something."""
    return Conclusion(findings.STAGE, ok, reason, to_jsonable_python(findings, inf_nan_mode="constants"), notes)


class Choice(Findings, Protocol):
    """The findings of a stage that chooses one of its trials."""

    @property
    def winner(self) -> str | None: ...


def winner_of(study: Study, kind: type[Choice]) -> str | None:
    """Return the id of the trial that this stage chose; None if it has chosen none, or none yet."""
    findings = found(study, kind)
    return findings.winner if findings else None


def found(study: Study, kind: type[Found]) -> Found | None:
    """Return what the stage with findings of this type found; None if it did not run, has not concluded, or found
    nothing."""
    conclusion = study.conclusions.get(kind.STAGE)
    return found_in(conclusion, kind) if conclusion else None


def found_in(conclusion: Conclusion, kind: type[Found]) -> Found | None:
    """Return the findings in a stage's conclusion; None if it found nothing. They are read from their JSON once."""
    if conclusion.findings is not None and kind not in conclusion.typed:
        conclusion.typed[kind] = _adapter(kind).validate_python(conclusion.findings)
    return conclusion.typed.get(kind)


@functools.cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
