"""Notices: what a run met and has dealt with, and its user should know, such as a damaged file. Loads no torch.

Code far below the run gives them, some of it behind the user's own functions, so they take no part in what a function
returns: `heard_by` says who hears those given in a block.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum


class NoticeKind(StrEnum):
    """What was met."""

    DAMAGED_CHECKPOINT = "damaged_checkpoint"
    """The contents of a checkpoint are not those that were written."""
    FOREIGN_CHECKPOINT = "foreign_checkpoint"
    """A checkpoint is another run's, or tells of more than the journal does."""
    DAMAGED_JOURNAL = "damaged_journal"
    """The journal's last line is whole, and not what was written."""
    DAMAGED_MEASUREMENT = "damaged_measurement"
    """What an earlier study left to later ones is not what was written."""
    DAMAGED_CURVE = "damaged_curve"
    """Lines that a run has kept of its course, for the report, are not what was written."""
    REBUILT_DATA = "rebuilt_data"
    """Tokens in the data cache were not those that were written, and were made again."""
    UNUSED_OPTIMIZER = "unused_optimizer"
    """The model brings an optimizer that its trials are not trained with."""
    ONE_VALIDATION_SAMPLE = "one_validation_sample"
    """Losses are those of one sample."""
    VALIDATES_ON_TRAINING = "validates_on_training"
    """Validation samples are training samples."""
    FEW_TRAINING_SAMPLES = "few_training_samples"
    """Runs meet each sample so often that they learn it by heart."""
    TRACKER_LOST = "tracker_lost"
    """Where curves are sent beside the study's own directory takes none, or not where it was asked to."""
    REPEATED_STREAM = "repeated_stream"
    """A stream held fewer samples than the run takes, and began again."""
    IDLE_NODES = "idle_nodes"
    """Nodes are not used, since they have another kind of device than the study measures on."""
    KEPT_TRIALS = "kept_trials"
    """Trials were measured with other code or data than later ones, and the user keeps them."""
    UNSTEADY_DATA = "unsteady_data"
    """Data are others every time that they are loaded."""
    LANE_DIED = "lane_died"
    """Processes of a lane died, and were replaced: what they ran has run again."""
    LANE_GIVEN_UP = "lane_given_up"
    """A lane runs no trials: its processes ended again and again, have another kind of device, or do not see the run directory."""


@dataclass(frozen=True)
class Notice:
    """Something amiss that was dealt with: the results stand."""

    kind: NoticeKind
    text: str
    """What it was and what was done, for people."""


Hear = Callable[[Notice], object]


def _warn(notice: Notice) -> None:
    warnings.warn(notice.text, stacklevel=3)


_hear: ContextVar[Hear] = ContextVar("hear", default=_warn)


def give_notice(kind: NoticeKind, text: str) -> None:
    """Tell whoever hears notices now; where nobody does it is a warning."""
    _hear.get()(Notice(kind, text))


@contextmanager
def heard_by(hear: Hear) -> Iterator[None]:
    """Have `hear` called with each notice that is given in this block."""
    token = _hear.set(hear)
    try:
        yield
    finally:
        _hear.reset(token)
