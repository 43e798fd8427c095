"""The list of benchmarks/real_workloads.py holds what its rule promises, and its judgement what its docstring says."""

from __future__ import annotations

import math

import pytest
from real_workloads import Outcome, answer_of, judged, length_of, steps_of
from strangers import Said
from workloads_of.listed import NANOGPT, REPOSITORIES_OF_DATA, WORKLOADS, Workload

WELL = Said(0, 1.0, "")


def test_the_list_is_what_was_promised() -> None:
    assert len(WORKLOADS) >= 6
    assert len({one.name for one in WORKLOADS}) == len(WORKLOADS)
    assert len({one.kind for one in WORKLOADS}) >= 4
    assert all(repository.count("/") == 1 and len(commit) == 40 for repository, commit in REPOSITORIES_OF_DATA.values())


@pytest.mark.parametrize("one", WORKLOADS, ids=lambda one: one.name)
def test_a_recipe_is_whole_and_says_where_its_authors_argue_for_it(one: Workload) -> None:
    assert one.recipe.batch > 1
    assert one.recipe.learning_rate > 0
    assert all((one.recipe.optimizer, one.recipe.schedule, one.recipe.length, one.recipe.argued))
    host, _, what = one.source.partition(":")
    assert (host == "github" and len(what.split("@")[1]) == 40 and one.sha256) or (host == "installed" and "==" in what)
    told = " ".join(one.command)
    for flag in one.batch.flags:  # where the command has it, it is the recipe's
        assert flag not in told or told.split(flag, 1)[1].strip().startswith(f"{one.recipe.batch} ")


@pytest.mark.parametrize("one", WORKLOADS, ids=lambda one: one.name)
def test_batch_rate_and_length_can_be_set_and_a_line_has_one_place_for_its_number(one: Workload) -> None:
    for setting in (one.batch, one.learning_rate, one.length):
        assert setting.flags or setting.lines
    for line in (line for setting in (one.batch, one.learning_rate, one.length, one.seed) for line in setting.lines):
        assert line.text.count("{value}") == 1


def ran(step: str, curve: list[tuple[float, float]]) -> Outcome:
    """A run with these (training seconds, loss)."""
    told = [(2_000, seconds, seconds, loss) for seconds, loss in curve]
    run = {"steps": 2_000, "batch": 12, "seconds": (curve[-1][0], curve[-1][0]), "curve": told}
    return Outcome(NANOGPT.name, step, WELL, run)


def studied(batch: int = 4, rate: float = 2e-3, share: float = 0.5) -> Outcome:
    found = {
        "verdict": "", "decided": True, "cost": 300.0, "batch": batch, "micro_batch": batch, "learning_rate": rate, "compile": False,
        "share": share, "by_speed": 1.25, "frontier": {"12": 100.0, "64": 200.0}, "command": ["train.py"], "flags": {},
    }  # fmt: skip
    return Outcome(NANOGPT.name, "study", WELL, study=found)


def of(*outcomes: Outcome) -> dict[str, Outcome]:
    return {one.step: one for one in outcomes}


def test_the_ratio_is_of_the_times_to_the_worst_end_of_the_authors_runs() -> None:
    theirs = [ran(f"alone-{seed}", [(20, 3.0), (40, 2.0 - seed / 100)]) for seed in range(3)]
    short = [ran(f"ours_short-{seed}", [(10, 3.0), (20, 2.0 if seed else 2.5)]) for seed in range(3)]
    whole = [ran(f"ours-{seed}", [(20, 3.0), (40, 1.0)]) for seed in range(3)]
    row = judged(NANOGPT, of(*theirs, *short, *whole, studied()))
    first = 20 + 20 * 0.5  # of the seed whose short run did not come to 2.0
    times = [(40, first), (20 + 20 / 1.01, 20), (20 + 20 / 1.02, 20)]
    assert row["time_ratio"] == pytest.approx(math.prod(a / b for a, b in times) ** (1 / 3), abs=1e-3)
    assert row["low"] < row["time_ratio"] < row["high"]
    assert row["came_to_it"] == "3 of 3"
    assert row["loss"] == 2.0
    assert row["speed"]["frontier_ratio"] == 2.0


def test_a_run_that_never_comes_there_has_its_whole_time_and_is_counted() -> None:
    known = of(ran("alone-0", [(20, 3.0), (40, 2.0)]), ran("ours-0", [(20, 3.0), (50, math.nan)]), studied(share=1.0))
    row = judged(NANOGPT, known)
    assert (row["came_to_it"], row["time_ratio"], row["low"]) == ("0 of 1", 0.8, None)


def test_an_answer_that_keeps_theirs_is_a_ratio_of_one() -> None:
    study = studied(12, 1e-3)
    assert answer_of(NANOGPT, study.study) is None
    assert judged(NANOGPT, of(ran("alone-0", [(40, 2.0)]), study))["time_ratio"] == 1.0


def test_what_failed_is_a_row_with_its_reason() -> None:
    study = Outcome(NANOGPT.name, "study", Said(2, 1.0, "running\nbatchscout: no loss"))
    row = judged(NANOGPT, of(ran("alone-0", [(40, 2.0)]), study))
    assert (row["time_ratio"], row["why"]) == (None, "batchscout: no loss")


def test_a_run_of_another_batch_has_the_samples_that_its_speed_makes_of_the_time() -> None:
    known = of(ran("alone-0", [(40, 2.0)]), studied())
    settings = answer_of(NANOGPT, known["study"].study)
    assert settings is not None
    assert length_of(NANOGPT, settings, 1.0, known, quick=False) == (4_800, 4_800)  # 2,000 x 12 / 1.25 / 4
    assert length_of(NANOGPT, settings, 0.5, known, quick=False)[0] == 2_400


def test_the_rival_gets_what_the_study_cost_and_arms_take_turns() -> None:
    class Chosen:
        quick, seeds = False, 3

    known = of(ran("alone-0", [(90, 2.0)]), studied())
    for factor, loss in zip((0.25, 0.5, 1, 2, 4), (5, 4, 3, 2, math.inf), strict=True):
        known[f"rate-{factor:g}"] = ran(f"rate-{factor:g}", [(9, loss)])
    steps = list(steps_of(NANOGPT, known, Chosen()))  # pyright: ignore[reportArgumentType]
    assert [share for name, _, share in steps if name.startswith("rate")] == [pytest.approx(300 / 5 / 90)] * 5
    assert [name for name, _, _ in steps][-5:] == ["alone-2", "ours-2", "ours_short-2", "rival-2", "rival_short-2"]
    assert steps[-1][1].learning_rate == 2e-3


def test_a_program_that_accumulates_is_typed_the_micro_batch_and_another_one_the_whole() -> None:
    study = studied(16).study | {"micro_batch": 4}
    whole = answer_of(NANOGPT, study)
    accumulated = answer_of(
        NANOGPT, study | {"flags": {"gradient_accumulation_steps": "--gradient_accumulation_steps="}}
    )
    assert whole is not None
    assert accumulated is not None
    assert (whole.batch, whole.micro_batch, accumulated.batch, accumulated.micro_batch) == (16, 16, 16, 4)
