"""Samples of uneven length: padded as the study file says, or told how to."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import datasets
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler

from batchscout.trainers.before.first_pass import parts
from batchscout.trainers.config import DataConfig, MicroBatch, Split
from batchscout.trainers.data.batches import fetch
from batchscout.trainers.data.loaders import lengths_told, read_by, workers_of
from batchscout.trainers.data.micro_batches import ByTokens, check_tokens
from batchscout.trainers.data.order import InOrder
from batchscout.trainers.data.padding import Padded, uneven
from batchscout.trainers.data.samples import load_data
from batchscout.trainers.errors import DataFault
from tests.support.tiny import LogitsOnly, config, cpu_run, gradient_of_step, relative_error

LENGTHS = [3, 1, 5, 2, 7, 4, 1, 6]
Pair = namedtuple("Pair", "tokens target")


def dictionaries() -> list[dict[str, Any]]:
    return [_sample(number, length) for number, length in enumerate(LENGTHS * 4)]


def _sample(number: int, length: int) -> dict[str, Any]:
    tokens = torch.randint(24, (length + 1,), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens[:-1], "labels": tokens[1:], "number": number}


class Listed(list[dict[str, Any]]):
    """A set that may have attributes."""


def sets(kind: str = "tensors") -> tuple[Any, Any]:
    found = [{key: one[key] for key in ("input_ids", "labels")} for one in dictionaries()]
    made = {
        "tensors": lambda one: one,
        "lists": lambda one: {key: value.tolist() for key, value in one.items()},
        "arrays": lambda one: {key: value.numpy() for key, value in one.items()},
        "tuples": lambda one: (one["input_ids"], one["labels"]),
    }[kind]
    return [made(one) for one in found], [made(one) for one in found]


class Collating(list[dict[str, Tensor]]):
    def collate_fn(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return samples[0]


def collating() -> tuple[Any, Any]:
    return Collating(dictionaries()), Collating(dictionaries())


def model(*, vocab_size: int = 24) -> nn.Module:
    return LogitsOnly(vocab_size=vocab_size)


HERE = "tests.trainers.data.test_padding"
PAD = {"input_ids": 0, "labels": -100}


def loaded(target: str = "sets", **changes: Any) -> Any:
    return load_data(DataConfig.model_validate({"target": f"{HERE}:{target}", **changes}))[0]


@pytest.mark.parametrize("kind", ["tensors", "lists", "arrays"])
def test_a_batch_is_padded_to_its_longest_sample_and_all_else_is_stacked(kind: str) -> None:
    batch = fetch(loaded(pad=PAD, kwargs={"kind": kind}), [0, 1, 3])
    samples = [dictionaries()[index] for index in (0, 1, 3)]
    assert batch["input_ids"].shape == batch["labels"].shape == (3, 3)
    for place, sample in enumerate(samples):
        length = len(sample["input_ids"])
        assert torch.equal(batch["labels"][place, :length], sample["labels"])
        assert batch["labels"][place, length:].eq(-100).all()
        assert batch["input_ids"][place, length:].eq(0).all()


def test_what_is_not_named_is_stacked() -> None:
    padded = Padded(dictionaries(), PAD, "the train set")
    assert fetch(padded, [2, 5])["number"].tolist() == [2, 5]


def test_places_of_tuples_are_named_by_their_number() -> None:
    tokens, labels = fetch(loaded(pad={0: 0, 1: -100}, kwargs={"kind": "tuples"}), [0, 4])
    assert tokens.shape == labels.shape == (2, 7)
    assert labels[0, 3:].eq(-100).all()
    pair = fetch(Padded([Pair(torch.ones(2), 1), Pair(torch.ones(3), 0)], {"0": 9}, "the train set"), [0, 1])
    assert isinstance(pair, Pair)
    assert pair.tokens.tolist() == [[1, 1, 9], [1, 1, 1]]
    assert pair.target.tolist() == [1, 0]


def test_lengths_are_those_of_the_samples_or_what_the_set_says() -> None:
    assert list(loaded(pad=PAD).lengths) == LENGTHS * 4
    samples = Listed(dictionaries())
    samples.lengths = [9] * len(samples)  # pyright: ignore[reportAttributeAccessIssue]
    assert Padded(samples, PAD, "the train set").lengths == [9] * len(samples)


def translations() -> Any:
    """As an encoder-decoder reads them: what is asked and what is answered are of lengths of their own."""
    return datasets.Dataset.from_list(
        [
            {"input_ids": [1] * asked, "labels": [2] * answered, "kind": number}
            for number, (asked, answered) in enumerate(TRANSLATIONS)
        ]
    )


TRANSLATIONS = [(3, 1), (2, 9), (4, 4), (5, 2)]


@pytest.mark.parametrize(
    ("pad", "lengths"),
    [(PAD, [3, 9, 4, 5]), ({"labels": -100}, [1, 9, 4, 2]), ({"input_ids": 0}, [3, 2, 4, 5])],
    ids=lambda one: "+".join(one) if isinstance(one, dict) else "",
)
def test_of_columns_the_length_is_that_of_the_longest_that_is_padded(pad: dict[str, int], lengths: list[int]) -> None:
    samples = translations()
    assert list(Padded(samples, pad, "the train set").lengths) == lengths
    part = DataLoader(samples, sampler=SubsetRandomSampler([3, 1]))
    assert list(Padded(read_by(part, "the loader"), pad, "the train set").lengths) == [lengths[1], lengths[3]]


def test_a_batch_of_columns_holds_no_more_tokens_than_were_asked_for() -> None:
    padded = Padded(translations(), PAD, "the train set")
    fits = 10 // max(padded.lengths)
    lengths = check_tokens(MicroBatch(tokens=10), fits, padded)
    plan = ByTokens(InOrder(), 0, None, lengths, max(lengths)).of_step(0, Split(fits, 4 // fits, 1))
    for batch in (fetch(padded, indices) for indices in plan.micro_batches):
        assert all(batch[name].numel() <= 10 for name in PAD)


def test_a_collate_fn_of_ones_own_pads_labels_that_are_the_longer_ones() -> None:
    collating = DataLoader(translations(), collate_fn=len)
    assert lengths_told(read_by(collating, "the loader")) == [3, 9, 4, 5]
    classes = datasets.Dataset.from_list([{"input_ids": [1] * asked, "labels": 0} for asked, _ in TRANSLATIONS])
    assert lengths_told(classes) == [3, 2, 4, 5]


def test_what_is_no_list_in_a_column_is_measured_by_its_samples() -> None:
    samples = translations()
    samples.set_transform(
        lambda rows: {"input_ids": rows["input_ids"], "mask": [[1] * len(one) for one in rows["labels"]]}
    )
    assert list(Padded(samples, {"input_ids": 0, "mask": 0}, "the train set").lengths) == [3, 9, 4, 5]


def prepared(_: int) -> None:
    """What the user's own loader does in a worker that begins."""


def loaders() -> tuple[Any, Any]:
    train, val = sets()
    return DataLoader(train, 8, num_workers=2, prefetch_factor=3, worker_init_fn=prepared), DataLoader(val)


@pytest.mark.parametrize("changes", [{}, {"pad": PAD}, {"pad": PAD, "pack": 16}], ids=["as it is", "padded", "packed"])
def test_the_workers_of_a_data_loader_fetch_what_is_padded_or_packed_too(changes: dict[str, Any]) -> None:
    workers = workers_of(None, loaded("loaders", **changes))
    assert (workers.number, workers.prefetch_factor, workers.init) == (2, 3, prepared)


def test_a_loader_of_pictures_is_no_data_loader() -> None:
    folder = Listed(dictionaries())
    folder.loader = open  # pyright: ignore[reportAttributeAccessIssue]  (as torchvision's DatasetFolder has it)
    assert [workers_of(None, one).number for one in (folder, Padded(folder, PAD, "the train set"))] == [0, 0]


@pytest.mark.parametrize("cut", [{}, {"micro_batch": {}}], ids=["by count", "by tokens"])
def test_the_gradient_does_not_depend_on_what_is_padded(cut: dict[str, Any]) -> None:
    def trial(micro_batch_size: int) -> Any:
        return config(
            model={"target": f"{HERE}:model"}, data={"target": f"{HERE}:sets", "pad": PAD}, loss="cross_entropy",
            micro_batch_size=micro_batch_size, gradient_accumulation_steps=16 // micro_batch_size,
            optimizer={"max_gradient_norm": None}, evaluation_samples=0, **cut,
        )  # fmt: skip

    whole, parts = (gradient_of_step(cpu_run(trial(size))) for size in (16, 1))
    assert relative_error(parts, whole) <= 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pad": {"tokens": 0}}, "data.pad names tokens, and in the train set of data.target '.*' a sample has input_ids, labels; name keys"),
        ({"pad": {"0": 0}, "target": "numbers"}, "data.pad names 0, and in .* a sample is a int; name keys of dictionaries, or places"),
        ({"pad": {"label": 0}, "target": "scalars"}, "data.pad names label, which is a single number in .*: leave it out"),
    ],
)  # fmt: skip
def test_a_wrong_pad_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataFault, match=message):
        fetch(loaded(**changes), [0, 1])


def numbers() -> tuple[list[int], list[int]]:
    return [1, 2], [1, 2]


def scalars() -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    return [{"label": 1}] * 2, [{"label": 1}]


def test_a_set_that_makes_its_own_batches_is_not_padded_too() -> None:
    with pytest.raises(
        DataFault, match=r"the train set of .* has a collate_fn of its own, .* leave one of the two out"
    ):
        loaded("collating", pad=PAD)


def test_what_fills_up_is_read_back_as_it_was_written() -> None:
    assert DataConfig.model_validate({"target": "text", "pad": {0: 1}}).model_dump()["pad"] == {"0": 1}


@pytest.mark.parametrize("kind", ["tensors", "lists"])
def test_samples_of_uneven_length_are_told_which_key_to_add(kind: str) -> None:
    expected = (
        r"input_ids of the samples of a batch differs in length \(1 and 3\), and nothing says how to pad it; set data.pad: "
        r"\{input_ids: 0, labels: -100\}, each with the value that fills it up, or give the data set a collate_fn"
    )
    with pytest.raises(DataFault, match=expected):
        fetch(loaded(kwargs={"kind": kind}), [0, 1])


def test_the_first_pass_refuses_them_in_these_words() -> None:
    trial = config(model={"target": f"{HERE}:model"}, data={"target": f"{HERE}:sets"}, loss="cross_entropy")
    found = list(parts(trial))[-1]
    assert not isinstance(found, str)
    assert found.outcome == "refused"
    assert "set data.pad: {input_ids: 0, labels: -100}" in found.said


def test_what_cannot_be_stacked_for_another_reason_says_its_own() -> None:
    assert uneven([{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}]) is None
    assert "give the data set a collate_fn" in str(uneven([torch.ones(2), torch.ones(3)]))
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        fetch([{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}], [0, 1])


def test_a_pad_is_a_number() -> None:
    with pytest.raises(
        ValidationError, match="labels is to be padded with 'ignore', which is no number; write one, such as 0 or -100"
    ):
        DataConfig.model_validate({"target": "text", "pad": {"labels": "ignore"}})
    with pytest.raises(
        ValidationError, match=r"0 does not say what is padded with what; write such as {input_ids: 0, labels: -100}"
    ):
        DataConfig.model_validate({"target": "text", "pad": 0})


def test_the_member_of_a_tuple_is_called_one() -> None:
    told = uneven([(torch.ones(2), 0), (torch.ones(3), 0)])
    assert told is not None
    assert told.startswith("member 0 of the samples of a batch differs in length (2 and 3)")
