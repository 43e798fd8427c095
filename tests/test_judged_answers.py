"""The judge of the study's answers (benchmarks/recommendation.py) is right itself: its worlds are what they promise, a waste is a
share of the training time, what has no answer counts as wrong, and the peers get the same."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
from made_worlds import DROP_BEGINS, KINDS, Made, made_world
from peer_searches import Space
from recommendation import (
    PEERS,
    Judged,
    Outcome,
    Study,
    calibration_error,
    judge,
    of_peer,
    outcome_of,
    studies_of,
    summary,
    time_to,
    true_share,
    waste_of,
)
from recorded_worlds import DOUBLING, Recorded
from replayed import Answer, replay
from world_table import load

from batchscout.orchestrator.stages.train.findings import TimeGain
from tests.support.processes import python
from tests.support.tiny import ROOT


@pytest.fixture(autouse=True)
def peers_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna comes with the extra `benchmarks` alone."""
    if find_spec("optuna") is None:
        monkeypatch.delitem(PEERS, "optuna")


NUMBERS = range(4)
COST = 7.25
"""In full runs: what the peers may spend."""


def worlds(*kinds: str) -> list[Made]:
    return [made_world(kind, number) for kind in kinds or KINDS for number in NUMBERS]


def answer(*chosen: Any, **claims: Any) -> Answer:
    return Answer(chosen or None, runs=1, cost=1.0, wait=1.0, **claims)


# Made worlds


def test_a_kind_and_a_number_are_one_world_with_the_same_noise() -> None:
    for world in worlds():
        again = made_world(world.kind, world.number)
        assert again == world
        rate = world.own_rate * 0.9
        assert again.loss(world.reference, rate, 1, 0.5) == world.loss(world.reference, rate, 1, 0.5)
    for kind in KINDS:
        assert made_world(kind, 0) != replace(made_world(kind, 1), number=0)


def test_nothing_in_a_made_world_ends_below_its_best_setting() -> None:
    for world in worlds():
        batch, rate = world.best()
        lowest = world.mean_loss(batch, rate)
        rates = [(batch, rate) for batch in world.budgets for rate in (*world.grid(batch), world.best_rate(batch))]
        assert all(world.mean_loss(*setting) >= lowest for setting in rates), world.name
        assert math.isfinite(lowest)


def test_every_run_has_noise_of_its_own() -> None:
    for world in worlds("plain", "quiet_seeds", "slow_clock"):
        rates = [world.own_rate * 2 ** (i / 1000) for i in range(200)]
        ends = [world.loss(world.reference, rate, 0, 1.0) for rate in rates]
        off = [end - world.mean_loss(world.reference, rate) for end, rate in zip(ends, rates, strict=True) if end]
        expected = world.noise[world.reference] * world.late_gain
        assert statistics.stdev(off) == pytest.approx(expected, rel=0.2)


def test_half_the_time_costs_what_a_doubling_is_worth_and_half_a_run_lies_a_late_gain_above_its_end() -> None:
    for world in worlds("plain"):
        batch, rate = world.best()
        end = world.mean_loss(batch, rate)
        assert world.mean_loss(batch, rate, 0.5) - end == pytest.approx(world.doubling * world.late_gain)
        halves = [world.loss(batch, rate, seed, 0.5) or math.nan for seed in range(400)]
        assert statistics.fmean(halves) - end == pytest.approx(world.late_gain, abs=0.2 * world.late_gain)


def test_each_kind_is_what_it_promises() -> None:
    for world in worlds("cliff", "late_cliff"):
        for batch in world.budgets:
            assert math.isinf(world.mean_loss(batch, 1.51 * world.best_rate(batch)))
            assert math.isfinite(world.mean_loss(batch, 1.09 * world.best_rate(batch)))
    for world in worlds("late_cliff"):
        rate = 2 * world.best_rate(world.reference)
        assert world.loss(world.reference, rate, 0, 0.5) is not None
        assert world.loss(world.reference, rate, 0, 0.6) is None
    for kind, low, high in (("rate_too_low", 2, 16), ("rate_too_high", 1 / 16, 1 / 2)):
        for world in worlds(kind):
            assert low <= world.best_rate(world.reference) / world.own_rate <= high
    for world in worlds("edge"):
        assert world.best()[0] in (min(world.budgets), max(world.budgets))
    for world in worlds("flat"):
        assert {waste_of(world, batch, world.best_rate(batch)) for batch in world.budgets} == {0.0}
    for world in worlds("plateau"):
        quiet = replace(world, noise=dict.fromkeys(world.noise, 0.0))
        seen = {round(quiet.loss(batch, quiet.rule(batch), 0, DROP_BEGINS) or 0, 9) for batch in quiet.budgets}
        assert len(seen) == 1
    for world in worlds("late_crossing"):
        quiet = replace(world, noise=dict.fromkeys(world.noise, 0.0))
        best, smallest = quiet.best()[0], min(quiet.budgets)
        assert best > smallest
        at_half = [quiet.loss(batch, quiet.best_rate(batch), 0, 0.5) or 0 for batch in (best, smallest)]
        assert at_half[0] > at_half[1], "the best at the end is behind on the way"


# What a setting wastes


def test_the_best_setting_wastes_nothing_and_others_the_more_the_further_they_lie_from_it() -> None:
    for world in worlds():
        batch, rate = world.best()
        assert waste_of(world, batch, rate) == 0.0
        for direction in (-1, 1):
            wastes = [waste_of(world, batch, rate * 2 ** (direction * off)) for off in (0.0, 0.1, 0.5, 1.0, 3.0)]
            assert wastes == sorted(wastes)
            assert wastes[1] > 0
        at_best = {batch: waste_of(world, batch, world.best_rate(batch)) for batch in world.budgets}
        by_level = sorted(world.level, key=lambda batch: world.level[batch])
        assert [at_best[batch] for batch in by_level] == sorted(at_best.values())


@pytest.mark.parametrize("share", [0.1, 0.5, 0.97])
def test_a_waste_is_the_share_of_the_training_time_that_the_best_setting_does_not_need(share: float) -> None:
    for world in worlds("plain", "quiet_seeds"):
        loss = world.mean_loss(*world.best(), share)
        assert time_to(world, world.best(), loss) == pytest.approx(share, rel=1e-6)


def test_what_diverges_wastes_all_of_the_time() -> None:
    world = made_world("cliff", 0)
    batch, rate = world.best()
    assert waste_of(world, batch, 4 * rate) == 1.0


def test_an_interval_covers_the_share_of_the_users_own_time_in_which_the_choice_comes_to_the_same_loss() -> None:
    world = made_world("plain", 1)
    assert true_share(world, 0, world.reference, world.own_rate) == 1.0
    true = true_share(world, 0, *world.best())
    assert true is not None
    assert world.mean_loss(*world.best(), true) == pytest.approx(world.mean_loss(world.reference, world.own_rate))
    for low, high, covered in ((0.5 * true, 2 * true, True), (1.1 * true, 2 * true, False)):
        claimed = TimeGain("own", true, low, high, by_rate=1.0, p_better=1.0)
        assert judge(world, 0, answer(*world.best(), time=claimed)).is_covered is covered
    assert judge(world, 0, answer(*world.best())).is_covered is None


def test_batches_that_are_the_best_together_share_the_claim() -> None:
    world = made_world("flat", 0)
    n = len(world.budgets)
    even = judge(world, 0, answer(*world.best(), p_best=dict.fromkeys(world.budgets, 1 / n)))
    assert calibration_error(even.claims) == 0
    one = made_world("edge", 0)
    sure = judge(one, 0, answer(*one.best(), p_best={batch: float(batch == one.best()[0]) for batch in one.budgets}))
    assert calibration_error(sure.claims) == 0


# A study without an answer, and tables


def test_a_study_without_an_answer_is_judged_as_wrong() -> None:
    nothing_trains = replace(made_world("cliff", 0), cliff=-100.0)
    found = replay(nothing_trains, 0, nothing_trains.timing_noise)
    assert found.chosen is None
    assert found.runs > 0
    judged = judge(nothing_trains, 0, found)
    assert judged.waste == 1.0
    figures = summary([judged, Judged(answer(4, 0.1), 0.0)])
    assert (figures["no_answer"], figures["within_10_percent"], figures["regret_time"]) == (0.5, 0.5, 0.5)
    for search in PEERS.values():
        assert of_peer(nothing_trains, search, COST, 0).chosen is None


BEST, BATCHES, BUDGETS = 0.004, (4, 8, 16), (2048, 4096)
RATES = tuple(0.001 * 2**i for i in range(6))
DIVERGES = 0.01


def line(batch: int, rate: float, seed: int, budget: int) -> str:
    """A run of a table that is a parabola in the log of the rate, in which high rates diverge and seeds deviate in turn."""
    octaves = math.log2(rate / BEST)
    seed_off = 0.01 * (-1) ** (seed + round(math.log2(rate / 0.001)))
    end = 2 + 100 / budget**0.4 + 0.1 * octaves**2 + 0.1 * abs(math.log2(batch / 8)) + seed_off
    points = [[budget // 4, end + 1.0], [budget // 2, end + 0.4], [budget, None if rate > DIVERGES else end]]
    keys = {"effective_batch_size": batch, "learning_rate": rate, "seed": seed, "sample_budget": budget}
    return json.dumps(keys | {"points": points})


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "toy.jsonl"
    lines = [line(b, r, s, n) for b in BATCHES for r in RATES for s in (0, 1) for n in BUDGETS]
    path.write_text("\n".join(lines) + "\n")
    return path


def recorded(table: Path) -> Recorded:
    return Recorded(load(table), 0, 1, 8, dict.fromkeys(BATCHES, BUDGETS[-1]))


def test_a_table_is_read_between_its_rates_by_a_parabola_and_a_run_keeps_its_seeds_noise(table: Path) -> None:
    case = recorded(table)
    assert case.best() == (8, BEST)
    assert case.user_rate(0) <= RATES[-1]
    between = BEST * 2**-0.6
    assert case.mean_loss(8, between) == pytest.approx(case.mean_loss(8, BEST) + 0.1 * 0.6**2)
    ends = [case.loss(8, between, seed, 1.0) or math.nan for seed in (0, 1)]
    assert abs(ends[0] - ends[1]) == pytest.approx(0.02), "the noise of the neighbours is not averaged"


def test_beside_a_rate_that_diverged_the_nearer_one_decides(table: Path) -> None:
    case = recorded(table)
    last = max(rate for rate in RATES if rate < DIVERGES)
    assert case.mean_loss(8, 1.3 * last) == case.mean_loss(8, last)
    assert case.loss(8, 1.3 * last, 0, 1.0) == case.loss(8, last, 0, 1.0)
    assert math.isinf(case.mean_loss(8, 1.5 * last))
    assert case.loss(8, 1.5 * last, 0, 1.0) is None
    with pytest.raises(ValueError, match="lies beyond"):
        case.loss(8, 1.1 * RATES[-1], 0, 1.0)


def test_where_one_seed_diverged_the_other_one_has_its_own_loss_and_the_setting_counts_as_diverging(
    table: Path,
) -> None:
    ends = [json.loads(one) for one in table.read_text().splitlines()]
    for run in ends:
        if run["learning_rate"] == BEST and run["seed"] == 1:
            run["points"][-1][1] = None
    table.write_text("".join(json.dumps(run) + "\n" for run in ends))
    case = recorded(table)
    assert math.isinf(case.mean_loss(8, BEST))
    assert case.loss(8, BEST, 1, 1.0) is None
    assert case.loss(8, BEST, 0, 1.0) == case.world.loss(8, BEST, 0, BUDGETS[-1], BUDGETS[-1])
    assert case.loss(8, BEST, 1, 0.5) is not None


def test_shorter_and_longer_runs_follow_the_power_law_beyond_what_was_recorded(table: Path) -> None:
    case = recorded(table)
    for share in (0.1, 0.5, 1.0, 4.0):
        assert case.mean_loss(8, BEST, share) == pytest.approx(2 + 100 / (share * BUDGETS[-1]) ** 0.4)
    assert time_to(case, case.best(), case.mean_loss(*case.best(), 0.3)) == pytest.approx(0.3)


@pytest.mark.parametrize("flat", [False, True], ids=["one length", "a longer run that is no better"])
def test_where_lengths_tell_nothing_a_doubling_is_worth_its_usual_share_of_the_late_gain(
    table: Path, flat: bool
) -> None:
    runs = [json.loads(one) for one in table.read_text().splitlines()]
    shortest = [run for run in runs if run["sample_budget"] == BUDGETS[0]]
    longer = [
        run | {"sample_budget": BUDGETS[1], "points": [[2 * samples, loss] for samples, loss in run["points"]]}
        for run in shortest
    ]
    table.write_text("".join(json.dumps(run) + "\n" for run in shortest + flat * longer))
    case = replace(recorded(table), budgets=dict.fromkeys(BATCHES, BUDGETS[0]))
    end = case.mean_loss(8, BEST)
    assert case.mean_loss(8, BEST, 0.5) == pytest.approx(end + DOUBLING * 0.4)
    assert waste_of(case, 8, 2 * BEST) < 0.5


@pytest.mark.parametrize("own_rate", [BEST, RATES[-1]])
def test_a_table_with_rates_that_diverge_is_judged(
    table: Path, own_rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorded, "user_rate", lambda case, seed: own_rate)
    found = outcome_of(Study(recorded(table), 0))
    assert found.ours.answer.chosen is not None
    assert found.ours.waste < 0.5
    assert found.peers.keys() == PEERS.keys()
    assert all(one.waste < 1.0 for name, one in found.peers.items() if name != "by_the_rule")


def test_given_tables_alone_are_played_and_studies_are_shared_out_over_their_cases(table: Path) -> None:
    kinds, _ = studies_of([table], 5)
    assert list(kinds) == ["toy"]
    assert len(kinds["toy"]) == 5
    assert len({(study.case.name, study.seed) for study in kinds["toy"] if isinstance(study.case, Recorded)}) == 5
    assert studies_of(None, 1)[0].keys() > KINDS.keys()


# The peers


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_spends_no_more_than_it_may_and_one_run(name: str) -> None:
    if name not in PEERS:
        pytest.skip(f"{name} is not installed")
    for world in (made_world("plain", 0), made_world("cliff", 1)):
        asked: dict[tuple[int, float], float] = {}

        def loss(batch: int, rate: float, share: float, world: Made = world, asked: Any = asked) -> float:
            asked[batch, rate] = max(share, asked.get((batch, rate), 0.0))
            known = world.loss(batch, rate, 0, share)
            return math.inf if known is None else known

        rates = {batch: world.grid(batch) for batch in world.budgets}
        rule = {batch: world.rule(batch) for batch in world.budgets}
        searched = PEERS[name](Space(rates, rule, world.reference, loss, COST), Random(0))
        assert searched.cost == sum(asked.values())
        assert searched.runs == len(asked)
        assert searched.cost <= (len(rates) + 2 if name == "by_the_rule" else COST + 1)
        assert all(rates[batch][0] <= rate <= rates[batch][-1] for batch, rate in asked)
        assert searched.chosen in asked or (name, world.kind) == ("by_the_rule", "cliff")


# All together


@pytest.mark.slow
def test_the_last_line_has_the_promised_figures(table: Path) -> None:
    pytest.importorskip("optuna")
    program = str(ROOT / "benchmarks" / "recommendation.py")
    done = python(program, "--quick", "--lanes", "1", "4", "--tables", str(table))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    of_any = {"within_3_percent", "within_10_percent", "regret_time", "no_answer", "runs", "seconds"}
    ours = of_any | {"coverage", "regret_claimed", "calibration", "decided", "decided_and_wrong", "pruning"}
    assert found.keys() >= {*ours, *PEERS, "worlds", "by_lanes"}
    assert all(found[peer].keys() >= of_any for peer in PEERS)
    assert found["worlds"]["toy"].keys() >= {*ours, *PEERS}
    assert found["by_lanes"]["4"].keys() >= {*ours, "wait"}
    assert found["pruning"].keys() == {"seconds_saved", "winner_cut"}


@pytest.mark.slow
def test_studies_of_every_kind_come_to_an_answer() -> None:
    outcomes: list[Outcome] = [outcome_of(study) for studies in studies_of(None, 2)[0].values() for study in studies]
    figures = summary([one.ours for one in outcomes])
    assert figures["no_answer"] <= 0.05
    assert figures["regret_time"] <= 0.3
    assert figures["pruning"]["winner_cut"] <= 0.1
