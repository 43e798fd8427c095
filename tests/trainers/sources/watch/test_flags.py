"""By which of its own options a script's recipe is set."""

from __future__ import annotations

import argparse

import pytest

from batchscout.trainers.sources.watch.flags import (
    Option,
    factors_of,
    flags_and_factors,
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
    found = flags_of(options(), [1e-3], 8, 4, 100)
    assert found == {
        "learning_rate": "--lr",
        "micro_batch_size": "--batch-size",
        "gradient_accumulation_steps": "--accumulate",
        "steps": "--max-steps",
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--batch-size=8", "--max-steps=100"], {"micro_batch_size", "steps"}),
        (["--batch-size=32", "--max-steps=400"], {"samples_per_step", "micro_batches"}),
    ],
)
def test_of_a_script_that_accumulates_the_values_tell_what_an_option_counts(
    words: list[str], expected: set[str]
) -> None:
    found = flags_of(options(*words), [1e-3], 8, 4, 100)
    assert found.keys() - {"learning_rate", "gradient_accumulation_steps"} == expected
    hard_coded = [one for one in options(*words) if "accum" not in one.name]
    assert flags_of(hard_coded, [1e-3], 8, 4, 100).keys() - {"learning_rate"} == expected


def test_the_batch_may_be_a_letter() -> None:
    assert flags_of([Option("-b", "b", 8), Option("-T", "T", 8)], [1e-3], 8, 1, None) == {"micro_batch_size": "-b"}


def test_of_an_option_that_was_parsed_twice_the_last_value_counts() -> None:
    twice = [*options("--lr", "5", "--accumulate", "2", "--max-steps", "7"), *options()]
    flags = flags_of(twice, [1e-3], 8, 4, 100)
    assert flags == flags_of(options(), [1e-3], 8, 4, 100)
    assert factors_of(twice, flags, 1e-3, 100) == factors_of(options(), flags, 1e-3, 100)


@pytest.mark.parametrize(("lr", "batch"), [(2e-3, 8), (1e-3, 16)])
def test_an_option_that_has_another_value_is_none_of_them(lr: float, batch: int) -> None:
    found = flags_of(options(), [lr], batch, 4, None)
    assert ("learning_rate" in found) == (lr == 1e-3)
    assert ("micro_batch_size" in found) == (batch == 8)


def test_every_name_of_a_script_is_an_option_where_it_is_called_so() -> None:
    names = {"learning_rate": 6e-4, "batch_size": 12, "always": True, "max_iters": 50, "_hidden": 3}
    found = list(options_by_name(["config/small.py", "--batch_size=12"], names))
    assert {one.flag for one in found} == {"--learning_rate=", "--batch_size=", "--max_iters="}
    assert flags_of(found, [6e-4], 12, 1, 50)["steps"] == "--max_iters="
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
    assert flags_of(list(options_typed(typed)), [1e-3], 8, 1, 100) == {
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
    assert with_values(["--size=3"], {"--size": "4", "--size=": "4"}) == ["--size=4"], (
        "of the parser and as it was typed"
    )


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
    flags = flags_of(found, [1e-4, 1e-3], 8, 1, 5000)
    assert flags == {"learning_rate": "--lr=", "steps": "--max_steps="}
    assert factors_of(found, flags, 1e-4, 5000) == pytest.approx(
        {"--lr=": 10, "--lr_decay_iters=": 1, "--warmup_steps=": 0.1}
    )
    assert factors_of(found, flags, 1e-3, None) == {}, "a run whose length is not known"


@pytest.mark.parametrize(
    "name", ["min_lr", "lr_min", "eta-min", "final_lr", "sched.lr_end", "min-learning-rate", "minlr"]
)
def test_the_lowest_rate_of_a_schedule_is_told_by_its_share_of_the_highest(name: str) -> None:
    for args in ([f"--{name}=1e-4"], [f"--{name}", "1e-4"]):
        (option,) = options_typed(args)
        assert factors_of([option], {}, 1e-3, 100) == {option.flag: pytest.approx(0.1)}
        assert factors_of([option], {}, 1e-5, 100) == {}, "a lowest rate above the highest is none"


@pytest.mark.parametrize("name", ["min_lr_ratio", "min_lr_steps", "end_epoch", "gamma", "lr_end_factor"])
def test_a_share_of_the_rate_is_no_rate(name: str) -> None:
    assert factors_of(list(options_typed([f"--{name}=0.0001"])), {}, 1e-3, 100) == {}


def test_in_a_run_of_passes_a_warm_up_of_more_steps_than_passes_counts_steps() -> None:
    found = list(options_typed(["--warmup-steps=500", "--warmup_iters=10", "--lr_decay_steps=30", "--t_max=5000"]))
    assert factors_of(found, {}, 1e-3, 5000, passes=10) == {"--warmup-steps=": 0.1}


def test_a_rate_that_was_typed_by_its_short_name_has_one_flag_and_one_factor() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-lr", "--learning-rate", type=float)
    args = ["-lr", "0.01"]
    parsed = list(options_of_parser(parser._actions, vars(parser.parse_args(args))))
    flags, factors = flags_and_factors((parsed, list(options_typed(args))), [1e-3, 1e-2], 8, 1, 5000, 0)
    assert (flags, factors) == ({"learning_rate": "-lr"}, {"-lr": pytest.approx(10)})


def test_where_the_length_is_told_in_micro_batches_so_is_the_schedule() -> None:
    found = list(options_typed(["--max_iters=1000", "--lr_decay_iters=1000", "--warmup_iters=100"]))
    flags, factors = flags_and_factors((found,), [1e-3], 4, 4, 250, 0)
    assert (flags, factors) == ({"micro_batches": "--max_iters="}, {"--lr_decay_iters=": 1.0, "--warmup_iters=": 0.1})
