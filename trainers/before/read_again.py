"""Whether data are the same when they are read again from the same random numbers: every trial reads them from the beginning, in a process
that others have read them in, and so does a run that goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from batchscout.trainers.data.batches import fetch
from batchscout.trainers.data.draws import drawing_from, seed_of
from batchscout.trainers.data.order import of_every_part
from batchscout.trainers.data.samples import SAMPLES_LOOKED_AT, Samples, SampleSet
from batchscout.trainers.data.streams import Stream
from batchscout.trainers.errors import DataFault
from batchscout.trainers.sources.contents import contents, digest_of

SECONDS = 2.0
"""For each set."""
AT_ONCE = 2
"""So many samples are read: some sets make no batch of a single one."""


def check_begins_anew(samples: Samples) -> None:
    """Raise DataFault for a stream whose first samples are others when it is begun again."""
    if not isinstance(samples, Stream):
        return
    first, again = list(samples.first(SAMPLES_LOOKED_AT)), samples.anew(SAMPLES_LOOKED_AT)
    if _digest(first) != _digest(again):
        raise DataFault(
            f"{samples.where} has other samples each time it is begun: it goes on where it was, or draws from a generator of its own. Trials "
            "would train on different samples, and one that goes on would leave some out; open files and make generators, with a seed, in its "
            "__iter__"
        )


def others_when_read_again(sets: Mapping[str, SampleSet]) -> str | None:
    """Return, in words, which sets give other samples when they are read again; None where none was seen to. sets: by their names."""
    found = [name for name, samples in sets.items() if _differs(samples)]
    if not found:
        return None
    return (
        f"samples of the {' and '.join(found)} data are others when they are read again from the same random numbers, as where a set draws from a "
        "generator of its own: a run is then another with each start and number of workers, and its loss at the same weights another in each "
        "evaluation. If that is not meant, draw from torch's, numpy's or Python's own generators, which are set anew for every batch"
    )


def _differs(samples: SampleSet) -> bool:
    ends, number = time.monotonic() + SECONDS, len(samples)
    for first in range(0, min(SAMPLES_LOOKED_AT, number), AT_ONCE):
        indices = [(first + place) % number for place in range(AT_ONCE)]
        try:
            once, again = (_read(samples, indices) for _ in range(2))
        except Exception:  # samples that cannot be read are told of elsewhere
            return False
        if once != again:
            return True
        if time.monotonic() > ends:
            break
    return False


def draws(samples: SampleSet) -> bool:
    """True if batches of a set are others with other random numbers, as where tokens are masked or pictures cut."""
    indices = of_every_part(len(samples), SAMPLES_LOOKED_AT)
    try:
        return _read(samples, indices) != _read(samples, indices, seed=1)
    except Exception:  # samples that cannot be read are told of elsewhere
        return False


def _read(samples: SampleSet, indices: list[int], seed: int = 0) -> str:
    with drawing_from(seed_of(seed)):
        return _digest(fetch(samples, indices))


def _digest(value: Any) -> str:
    return digest_of(contents(value))
