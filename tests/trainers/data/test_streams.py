"""Every split of a stream sees the same samples in the same order, and a run that goes on is the uninterrupted one, bit by bit."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from batchscout.trainers.before.first_pass import FirstPass, parts
from batchscout.trainers.config import DataConfig, TrialConfig
from batchscout.trainers.data import streams
from batchscout.trainers.data.samples import load_data
from batchscout.trainers.data.streams import Place, Stream, StreamReader
from batchscout.trainers.loop import train
from batchscout.trainers.model.parallel import whole
from batchscout.trainers.notices import NoticeKind
from batchscout.trainers.report import Answer, Report
from batchscout.trainers.sources.watch.batches import Rows
from tests.support import fed
from tests.support.ranks import on_two_ranks
from tests.support.tiny import assert_equal_bit_by_bit, config, cpu_run, gradient_of_step, newest_state, stop_at

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def every_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the machine is, a stream tells its state at each step."""
    monkeypatch.setattr(streams, "SECONDS_BETWEEN_STATES", 0.0)


def trial(target: str = "streams", workers: int | None = None, **changes: Any) -> TrialConfig:
    kwargs = changes.pop("kwargs", {})
    data = {"target": f"tests.support.fed:{target}", "kwargs": kwargs, "workers": workers}
    found = config(data=data, **changes)
    if target == "streams":
        return found
    told = {"vocab_size": 24, "seq_len": 12}  # which those of the library do not tell
    return found.model_copy(update={"model": found.model.model_copy(update={"kwargs": found.model.kwargs | told})})


def stream_of(target: str = "streams", **kwargs: Any) -> Stream:
    found, _ = load_data(DataConfig(target=f"tests.support.fed:{target}", kwargs=kwargs))
    assert isinstance(found, Stream)
    return found


def read(reader: StreamReader, *numbers: int) -> list[list[int]]:
    return [sample["input_ids"].tolist() for sample in reader.take(numbers, min(numbers))]


ALL_KINDS = [
    ("streams", {"kind": "plain"}),
    ("streams", {"kind": "resumable"}),
    ("of_library", {}),
    ("of_library", {"shuffled": True}),
]


@pytest.mark.parametrize(("target", "kwargs"), ALL_KINDS)
def test_the_place_of_a_stream_brings_it_back(target: str, kwargs: dict[str, Any]) -> None:
    """In any pass, and from a place before the one that is asked for."""
    numbers = range(150)
    whole = read(StreamReader(stream_of(target, num_train=60, **kwargs), 0, None, seed=3), *numbers)
    reader = StreamReader(stream_of(target, num_train=60, **kwargs), 0, None, seed=3)
    for at in (0, 1, 17, 59, 60, 61, 119, 130):
        place = reader.place_at(at)
        assert place is not None
        again = Place(**dataclasses.asdict(place))
        for begin in (at, at + 3):
            other = StreamReader(stream_of(target, num_train=60, **kwargs), begin, again, seed=3)
            assert read(other, *range(begin, 150)) == whole[begin:]


def test_a_state_that_leaves_samples_out_is_not_relied_on() -> None:
    shuffled = StreamReader(stream_of("of_library", shuffled=True), 0, None, seed=0).place_at(40)
    plain = StreamReader(stream_of("of_library"), 0, None, seed=0).place_at(40)
    assert shuffled is not None
    assert shuffled.state is None
    assert plain is not None
    assert plain.state is not None


def test_a_resumed_stream_is_not_read_again() -> None:
    stream = stream_of(kind="resumable")
    place = StreamReader(stream, 0, None, seed=0).place_at(100)
    reader = StreamReader(stream, 100, place, seed=0)
    assert reader._samples.taken == 100
    assert stream.samples.taken == 0, "only copies are read"


SPLITS = [(4, 1), (1, 4)]


@pytest.mark.parametrize(("target", "kwargs"), ALL_KINDS)
def test_every_split_takes_the_same_samples(target: str, kwargs: dict[str, Any]) -> None:
    gradients = []
    for size, accumulation in SPLITS:
        run = cpu_run(
            trial(
                target, kwargs=kwargs, micro_batch_size=size, gradient_accumulation_steps=accumulation, statistics=False
            )
        )
        gradients.append([gradient_of_step(run) for _ in range(3)][-1])
    for gradient in gradients[1:]:
        assert (gradient - gradients[0]).norm() <= 1e-5 * gradients[0].norm()


def weights_after(changes: dict[str, Any]) -> torch.Tensor:
    run = cpu_run(trial(**changes), steps=4)
    run.close()
    return torch.cat([whole(parameter).flatten() for parameter in run.parameters]).detach()


def test_two_ranks_train_what_one_does(tmp_path: Path) -> None:
    """Streams that draw random numbers, too: each number's draws are its own."""
    alone = weights_after({"micro_batch_size": 4})
    both = on_two_ranks(weights_after, tmp_path, {"micro_batch_size": 2, "world_size": 2})
    assert torch.equal(both[0], both[1])
    assert (both[0] - alone).norm() <= 1e-3 * alone.norm(), (
        "four steps of Adam, which makes more of what rounding makes"
    )


LONG: dict[str, Any] = {
    "micro_batch_size": 4, "gradient_accumulation_steps": 2, "sample_budget": 250, "evaluations": (100,),
    "rungs": (32, 220), "dropout": 0.1, "statistics": False,
}  # fmt: skip


@pytest.mark.parametrize(("target", "kwargs"), ALL_KINDS[1:])
def test_a_run_that_goes_on_is_the_uninterrupted_one(target: str, kwargs: dict[str, Any], tmp_path: Path) -> None:
    """Over a further pass, with and without a worker."""
    train(trial(target, 0, kwargs=kwargs, **LONG), lambda report: None, tmp_path / "whole")
    listener = stop_at(32, 220)
    assert train(trial(target, 1, kwargs=kwargs, **LONG), listener, tmp_path / "parts") == Answer.STOP
    assert train(trial(target, 0, kwargs=kwargs, **LONG), listener, tmp_path / "parts") == Answer.STOP
    assert train(trial(target, 1, kwargs=kwargs, **LONG), listener, tmp_path / "parts") == Answer.GO_ON
    assert_equal_bit_by_bit(newest_state(tmp_path / "whole/checkpoints"), newest_state(tmp_path / "parts/checkpoints"))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_further_pass_is_told_once(workers: int, tmp_path: Path) -> None:
    reports: list[Report] = []
    train(trial(workers=workers, kwargs={"num_train": 50}, sample_budget=90), reports.append, tmp_path)
    notices = [report.notice for report in reports if report.notice]
    assert [notice.kind for notice in notices] == [NoticeKind.REPEATED_STREAM]
    assert notices[0].text == (
        "the train stream of data.target 'tests.support.fed:streams' came to its end in the step that began at 48 samples, and began again"
    )
    assert reports[-1].metrics["stream_passes"] == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_cannot_begin_again_ends_the_run_with_the_remedy(workers: int, tmp_path: Path) -> None:
    message = (
        r"the train stream of .* ended after 50 samples and has none when it is begun again, and the run takes more; let its __iter__ begin "
        r"anew each time, or set sample_budget to at most 50"
    )
    one = trial(workers=workers, kwargs={"kind": "once", "num_train": 50}, sample_budget=90)
    with pytest.raises(Exception, match=message):
        train(one, lambda report: None, tmp_path)


def test_val_is_the_first_samples_read_once() -> None:
    run = cpu_run(trial(evaluation_samples=8))
    assert isinstance(run.val_set, Stream)
    kept = run.val_set.first(8)
    assert len(kept) == 8
    assert all(a is b for a, b in zip(kept, run.val_set.first(5), strict=False))


@pytest.mark.parametrize(
    ("target", "kwargs", "workers", "message"),
    [
        ("streams", {"kind": "generator"}, None, "is a generator, which can be read once, and every run of a study begins anew; return an object whose __iter__ begins again"),
        ("streams", {"kind": "empty"}, None, "returned 0 train and 1 val samples; each needs at least one"),
        ("split_by_rank", {}, None, "is split by rank .*; leave the split out"),
        ("streams", {}, 2, "data.workers is 2, and the train stream of .* is a stream, whose samples have one order: one process reads them; set data.workers: 1"),
    ],
)  # fmt: skip
def test_a_stream_that_cannot_be_taken_is_refused(
    target: str, kwargs: dict[str, Any], workers: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_data(DataConfig(target=f"tests.support.fed:{target}", kwargs=kwargs, workers=workers))


@pytest.mark.parametrize(
    ("target", "kwargs", "begins_anew"),
    [
        ("streams", {}, True),
        ("streams", {"kind": "resumable"}, True),
        ("of_library", {"shuffled": True}, True),
        ("streams", {"kind": "goes on"}, False),
        ("streams", {"kind": "shuffled"}, False),
    ],
)
def test_a_stream_that_does_not_begin_anew_is_refused_in_the_first_pass(
    target: str, kwargs: dict[str, Any], begins_anew: bool
) -> None:
    """A trial would go on where the one before it has stopped."""
    *_, found = parts(trial(target, kwargs=kwargs))
    assert isinstance(found, FirstPass)
    assert (found.outcome, found.part) == (("passed", "pass") if begins_anew else ("refused", "data"))
    assert begins_anew or re.match(
        r"the train stream of .* has other samples each time it is begun: .*; open files and make generators, with a seed, in its __iter__$",
        found.said,
    )


@pytest.mark.parametrize(("of", "name"), [("train", "training"), ("val", "validation")])
def test_a_set_that_draws_from_a_generator_of_its_own_is_told(of: str, name: str) -> None:
    *_, found = parts(trial("with_its_own_generator", kwargs={"of": of}))
    *_, drawing = parts(trial("drawing"))
    assert isinstance(found, FirstPass)
    assert isinstance(drawing, FirstPass)
    assert (found.outcome, drawing.outcome) == ("passed", "passed")
    assert f"samples of the {name} data are others when they are read again from the same random numbers" in found.said
    assert drawing.said == ""


def a_loader() -> tuple[Any, Any]:
    train, val = fed.streams()
    return DataLoader(train, batch_size=8, num_workers=2), val


def test_a_loader_over_a_stream_is_a_stream_with_one_worker() -> None:
    run = cpu_run(config(data={"target": f"{__name__}:a_loader"}))
    assert isinstance(run.train_set, Stream)
    assert run.feed.workers.number == 1


class SeededForEachRow(Rows):
    num_ready = property(lambda self: 0, lambda self, number: None)  # pyright: ignore[reportAssignmentType]


@pytest.mark.parametrize("begin", [0, 10])
def test_the_rows_of_a_scripts_batches_are_the_same_where_only_what_draws_is_seeded(begin: int) -> None:
    def batches() -> Iterator[Any]:
        for size in itertools.cycle((4, 1, 3)):
            yield torch.rand(size, 2)

    wanted, found = (
        StreamReader(Stream(rows(batches), "batches"), begin, None, seed=3).take(range(begin, 40), begin)
        for rows in (SeededForEachRow, Rows)
    )
    assert torch.equal(torch.stack(found), torch.stack(wanted))
