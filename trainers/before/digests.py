"""What a study's data and its model are known by again: digests that another process finds, too."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from batchscout.trainers.data.samples import SAMPLES_LOOKED_AT, Samples, SampleSet, first_of, num_samples
from batchscout.trainers.sources.contents import built, digest_of, item, items

DATA = ("training data", "validation data")
MODEL, WEIGHTS = "what the model is built of", "the number of weights"


def digests_of_data(train_set: Samples, val_set: Samples) -> dict[str, str]:
    """Return of each set what it says of its contents, or else a digest of some of its samples, and how many there are. Raises what
    reading them does."""
    found = {}
    for name, samples in zip(DATA, (train_set, val_set), strict=True):
        told = getattr(samples, "content_hash", None)
        found[name] = digest_of(items(first_of(samples, SAMPLES_LOOKED_AT))) if told is None else str(told)
        found[_number_of(name)] = str(num_samples(samples))
    return found


def digest_of_model(module: nn.Module) -> dict[str, str]:
    """Return a digest of what a model has been made of, which a config file or the environment may decide; of its weights the number."""
    num_weights = sum(tensor.numel() for tensor in module.parameters())
    return {MODEL: digest_of(built(module)), WEIGHTS: str(num_weights)}


def num_validated_on_training(train_set: Samples, val_set: Samples) -> int:
    """Return how many of the first validation samples were looked for among the first training samples, if all are there; 0 if not.
    Samples that are drawn anew whenever they are read are never found, and of those that are often alike nothing is known."""
    known, looked_for = (_each_of(first_of(samples, SAMPLES_LOOKED_AT)) for samples in (train_set, val_set))
    are_alike = len(set(looked_for)) < max(2, len(looked_for))
    return len(looked_for) if set(looked_for) <= set(known) and not are_alike else 0


def _each_of(samples: SampleSet) -> list[str]:
    return [digest_of(item(samples, i)) for i in range(min(SAMPLES_LOOKED_AT, len(samples)))]


def steady(here: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
    """Return what two processes have found alike. What is another in each, as data are that a split without a seed makes, is known by its
    number alone, of samples or of weights."""
    alike = {name: digest for name, digest in here.items() if there.get(name) == digest}
    known_by = [name if name in alike else _number_of(name) for name in (*DATA, MODEL)]
    return {name: alike[name] for name in known_by if name in alike}


def _number_of(what: str) -> str:
    return WEIGHTS if what == MODEL else f"the number of {what.removesuffix(' data')} samples"
