"""By which of its own options a script's recipe is set."""

from __future__ import annotations

import argparse

import pytest

from batchscout.trainers.sources.watch.flags import (
    Option,
    factors_of,
    flags_of,
    options_by_name,
    options_of_parser,
    options_typed,
    with_values,
)


def options(*words: str) -> list[Option]:
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch-size", type=int, default=8)
    parser.add_argument("--test-batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--min-lr", type=float, default=1e-3)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--verbose", action="store_true")
    return list(options_of_parser(parser._actions, vars(parser.parse_args(list(words)))))


def test_options_are_found_by_name_and_value() -> None:
    found = flags_of(options(), [1e-3], 32, 3200)
    assert found == {
        "learning_rate": "--lr",
        "micro_batch_size": "--batch-size",
        "gradient_accumulation_steps": "--accumulate",
        "steps": "--max-steps",
    }


def test_the_batch_may_be_a_letter() -> None:
    assert flags_of([Option("-b", "b", 8), Option("-T", "T", 8)], [1e-3], 8, None) == {"micro_batch_size": "-b"}


@pytest.mark.parametrize(("lr", "batch"), [(2e-3, 32), (1e-3, 64)])
def test_an_option_that_has_another_value_is_none_of_them(lr: float, batch: int) -> None:
    found = flags_of(options(), [lr], batch, None)
    assert ("learning_rate" in found) == (lr == 1e-3)
    assert ("micro_batch_size" in found) == (batch == 32)


def test_every_name_of_a_script_is_an_option_where_it_is_called_so() -> None:
    names = {"learning_rate": 6e-4, "batch_size": 12, "always": True, "max_iters": 50, "_hidden": 3}
    found = list(options_by_name(["config/small.py", "--batch_size=12"], names))
    assert {one.flag for one in found} == {"--learning_rate=", "--batch_size=", "--max_iters="}
    assert flags_of(found, [6e-4], 12, 600)["steps"] == "--max_iters="
    assert not list(options_by_name(["--lr", "1"], names))


def test_what_was_typed_is_an_option_whatever_reads_it() -> None:
    """Click, Fire and Hydra have no parser of Python's."""
    typed = [
        "train",
        "--lr",
        "1e-3",
        "--eval-batch-size",
        "64",
        "data.batch-size=8",
        "--max_steps=100",
        "-v",
        "--name",
        "x",
        "3",
    ]
    assert flags_of(list(options_typed(typed)), [1e-3], 8, 800) == {
        "learning_rate": "--lr",
        "micro_batch_size": "data.batch-size=",
        "steps": "--max_steps=",
    }
    assert not list(options_typed([]))
    written = with_values(typed, {"--lr": "2e-3", "data.batch-size=": "16", "--max_steps=": "50"})
    assert written[1:6] == ["--lr", "2e-3", "--eval-batch-size", "64", "data.batch-size=16"]
    assert written[6] == "--max_steps=50"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--lr", "1", "x"], ["--lr", "2", "x"]),
        (["--lr=1", "x"], ["--lr=2", "x"]),
        (["x"], ["x", "--lr", "2"]),
    ],
)
def test_a_value_takes_the_place_of_what_was_typed(args: list[str], expected: list[str]) -> None:
    assert with_values(args, {"--lr": "2"}) == expected
    assert with_values(["--size=3"], {"--size=": "4", "--lr=": "2"}) == ["--size=4", "--lr=2"]


def test_what_counts_steps_of_the_schedule_and_the_rate_of_another_group_are_told_by_their_factors() -> None:
    typed = [
        "--lr=1e-3",
        "--max_steps=5000",
        "--lr_decay_iters=5000",
        "--warmup_steps=500",
        "--eval_steps=100",
        "--lr_step_size=30",
        "--decay=2",
    ]
    found = list(options_typed(typed))
    flags = flags_of(found, [1e-4, 1e-3], 8, 40_000)
    assert flags == {"learning_rate": "--lr=", "steps": "--max_steps="}
    assert factors_of(found, flags, 1e-4, 5000) == pytest.approx(
        {"--lr=": 10, "--lr_decay_iters=": 1, "--warmup_steps=": 0.1}
    )
    assert factors_of(found, flags, 1e-3, None) == {}, "a run of passes"
