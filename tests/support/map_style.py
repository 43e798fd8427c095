"""Data sets that are no streams, as most tests have them."""

from __future__ import annotations

from batchscout.trainers.config import DataConfig
from batchscout.trainers.data.samples import Samples, SampleSet, load_data
from batchscout.trainers.data.streams import Stream


def map_style(samples: Samples) -> SampleSet:
    assert not isinstance(samples, Stream)
    return samples


def map_style_sets(config: DataConfig) -> tuple[SampleSet, SampleSet]:
    """(train, val) of `load_data`."""
    train, val = load_data(config)
    return map_style(train), map_style(val)
