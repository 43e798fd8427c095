"""A mode is how samples are run, whatever their number: the frontier compares modes, and hands one on to later
stages."""

from __future__ import annotations

from dataclasses import dataclass

from batchscout.trainers.config import ActivationCheckpointing, Compile, CrossEntropy, Precision, TrialConfig
from batchscout.trainers.knobs import in_words


@dataclass(frozen=True)
class Mode:
    activation_checkpointing: ActivationCheckpointing
    compile: Compile
    precision: Precision
    cross_entropy: CrossEntropy = "whole"
    """How the built-in gpt computes its loss; other models have no such choice."""
    seq_len: int | None = None
    """None for samples as long as the data says."""
    memory_knobs: tuple[str, ...] = ()
    """The names of the memory knobs in use, sorted."""

    def __str__(self) -> str:
        parts = [
            str(self.activation_checkpointing),
            compile_text(self.compile),
            "chunked" if self.cross_entropy == "chunked" else "",
            f"T{self.seq_len}" if self.seq_len else "",
            *self.memory_knobs,
        ]
        return "-".join(filter(None, parts))

    def in_words(self) -> str:
        """Return the activation checkpointing for a sentence, and whatever else is not as it mostly is."""
        compiled = {"whole": "compiled as one graph", "eager": "not compiled"}.get(compile_text(self.compile), "")
        chunked = "cross-entropy in chunks" if self.cross_entropy == "chunked" else ""
        longer = f"samples of {self.seq_len}" if self.seq_len else ""
        knobs = in_words(self.memory_knobs)
        more = ", ".join(filter(None, [compiled, chunked, longer, knobs]))
        return f"{self.activation_checkpointing} ({more})" if more else str(self.activation_checkpointing)

    def fields(self) -> dict[str, object]:
        """Return the fields of a trial that have the mode's own names."""
        return {
            "activation_checkpointing": self.activation_checkpointing,
            "compile": self.compile,
            "precision": self.precision,
            "memory_knobs": self.memory_knobs,
        }

    def changes(self, base: TrialConfig) -> dict[str, object]:
        """Return the fields in which a trial in this mode differs from `base`."""
        changes = self.fields()
        if self.cross_entropy != _cross_entropy(base):
            kwargs = base.model.kwargs | {"cross_entropy": self.cross_entropy}
            changes["model"] = base.model.model_copy(update={"kwargs": kwargs}).model_dump()
        if self.seq_len is not None:
            kwargs = base.data.kwargs | {"seq_len": self.seq_len}
            changes["data"] = base.data.model_copy(update={"kwargs": kwargs}).model_dump()
        return changes


def compile_text(compiled: Compile) -> str:
    """Return what sets it apart from blocks that are compiled one by one."""
    return "whole" if compiled == "whole" else "" if compiled else "eager"


def mode_of(config: TrialConfig) -> Mode:
    """Return the mode of a trial, without its sample length: that is a part of its data."""
    return Mode(
        config.activation_checkpointing,
        config.compile,
        config.precision,
        _cross_entropy(config),
        memory_knobs=config.memory_knobs,
    )


def _cross_entropy(config: TrialConfig) -> CrossEntropy:
    return config.model.kwargs.get("cross_entropy", "whole") if config.model.target == "gpt" else "whole"
