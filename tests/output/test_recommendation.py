"""From a study to what to type into a trainer."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.output.recommendation import Recommendation, Sample, recommend, write_recommendation
from batchscout.orchestrator.stages.grid import GridFindings
from batchscout.orchestrator.stages.train import LearningRateFindings, TrainFindings
from batchscout.orchestrator.study.events import FactsRead
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.journal import Journal, replay
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.units import loss_text, share_text, training_time_text
from batchscout.trainers.config import TEXT_SEQ_LEN, DevicePeak, TrialConfig
from batchscout.trainers.sources.settings import OwnRun
from tests.support.example_study import (
    add_trial,
    conclude,
    end_trial,
    example_config,
    example_recommendation,
    example_study,
    tell,
)
from tests.support.lane_player import Player, director_of, play_study, study_of
from tests.support.loss_worlds import IDEAL, LossWorld, throughput_of
from tests.support.outcome import recommendation_of
from tests.support.worlds import FRONTIER, MIB, World, failing

STAGES = [{"type": "train", "max_runs": 6}, {"type": "learning_rate"}]
GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*/recommendation.json"))


RATES = throughput_of({batch: IDEAL.samples_per_second(batch) for batch in (4, 8, 64, 128)}, largest_micro_batch=32)


def with_accidents(config: TrialConfig, samples: int) -> dict[str, Any]:
    """The largest batch runs out of memory, and high learning rates diverge."""
    if config.effective_batch_size == 128:
        return {"outcome": "out_of_memory", "reason": "too large"}
    too_high = config.learning_rate > 1.5e-3 * (config.effective_batch_size / 8) ** 0.5
    return IDEAL(config, samples) | ({"loss": math.nan, "val_loss": math.nan} if too_high and samples > 3000 else {})


def whole_study(path: Path, world: World = with_accidents) -> tuple[StudyConfig, Study]:
    config = study_of(stages=STAGES, sample_budget=4096)
    return config, play_study(path, config, world, found=(replace(FRONTIER, limit_bytes=10 * 2**20), RATES))


def recommended(path: Path, world: World = with_accidents) -> tuple[Recommendation, Study]:
    config, study = whole_study(path, world)
    return recommendation_of(config, study), study


def test_the_recommendation_has_every_promised_key_and_its_numbers_agree(tmp_path: Path) -> None:
    found, _ = recommended(tmp_path / "journal.jsonl")
    assert {
        "micro_batch_size", "gradient_accumulation_steps", "world_size", "effective_batch_size",
        "activation_checkpointing", "compile", "precision", "learning_rate", "warmup_samples", "verdict", "decided", "time", "regret_time", "p_best", "scope",
        "undecided_between", "evidence", "alternatives", "ruled_out",
    } <= found.to_json().keys()  # fmt: skip
    product = found.micro_batch_size * found.gradient_accumulation_steps * found.world_size
    assert (found.micro_batch_size, found.gradient_accumulation_steps) == (32, 2)
    assert found.effective_batch_size == product == 64
    assert found.sample_budget % 64 == 0
    assert found.sample_budget == pytest.approx(
        4096 * IDEAL.samples_per_second(64) / IDEAL.samples_per_second(8), abs=32
    )
    assert found.warmup_samples == min(30 * 64, round(found.sample_budget / 5))
    assert found.complete


def test_the_verdict_has_the_margin_over_the_baseline_how_sure_it_is_and_its_scope(tmp_path: Path) -> None:
    found, study = recommended(tmp_path / "journal.jsonl")
    baseline, winner = study.trials["train-m8k1"], study.trials[found.evidence.trial]
    time = found.time
    assert time is not None
    assert time.by_speed is not None
    assert found.regret_time is not None
    assert time.low < time.share < time.high < 1
    assert time.trial == baseline.id
    shares = time.share, time.low, time.high, time.by_rate, time.by_batch, time.by_speed
    share, low, high, by_rate, by_batch, by_speed = map(share_text, shares)
    assert found.verdict.startswith(
        f"Train with micro-batch 32, 2 accumulation steps (effective batch 64), activation checkpointing none and learning "
        f"rate {found.learning_rate:.3g}: val loss {winner.measured('val_loss'):.3f} against {baseline.measured('val_loss'):.3f} with your own "
        f"setting (effective batch 8, learning rate 0.001) after the same training time (12 s); it reaches the same loss in "
        f"{share} of the training time ({low} to {high} with probability 0.9) = {by_rate} by the learning rate "
        f"x {by_batch} by the batch x {by_speed} by its {'higher' if time.by_speed < 1 else 'lower'} samples/s; this setting wastes "
    )
    seconds = [trial.config.effective_batch_size / trial.measured("step_seconds") for trial in (baseline, winner)]
    assert time.by_speed == pytest.approx(seconds[0] / seconds[1])
    pays = training_time_text(study.lane_seconds / (1 - time.share))
    assert found.verdict.endswith(
        f"Measured with {found.scope}. The study took {training_time_text(study.lane_seconds)} of lane time in all, and pays off for runs "
        f"of {pays} or more. For a longer run, give real_run.samples."
    )


def test_evidence_names_the_trial_the_memory_left_and_what_every_stage_found(tmp_path: Path) -> None:
    found, study = recommended(tmp_path / "journal.jsonl")
    evidence, winner = found.evidence, study.trials[found.evidence.trial].config
    assert (winner.learning_rate, winner.effective_batch_size) == (found.learning_rate, 64)
    assert evidence.memory_margin_bytes == 9 * 2**20
    assert evidence.memory == "1 MiB of 10 MiB, 9 MiB left"
    assert set(evidence.stages) == {"frontier", "throughput", "train", "learning_rate"}


@pytest.mark.parametrize(
    ("source", "words"),
    [("measured", "that matrix products reached on this device"), ("data sheet", "of the device's data sheet")],
)
def test_the_utilisation_names_its_peak(tmp_path: Path, source: Any, words: str) -> None:
    def used(config: TrialConfig, samples: int) -> dict[str, Any]:
        return {**IDEAL(config, samples), "mfu": 0.5}

    config, study = whole_study(tmp_path / "journal.jsonl", used)
    study.facts = Facts(device_peaks={"float32": DevicePeak(flops_per_second=1.58e11, source=source)})
    found = recommendation_of(config, study)
    assert f"MFU is relative to the 1.58e+11 FLOP/s in float32 {words}" in found.evidence.notes
    assert found.evidence.mfu == 0.5
    winner = study.trials[found.evidence.trial]
    study.trials[winner.id] = replace(winner, metrics=winner.metrics | {"mfu": 1.358})
    above = recommendation_of(config, study).evidence
    assert above.mfu is None
    assert [note for note in above.notes if "1.58e+11" in note and words in note and note.startswith("no MFU")]


def test_everything_that_was_ruled_out_is_there_with_its_reason(tmp_path: Path) -> None:
    found, study = recommended(tmp_path / "journal.jsonl")
    ended_badly = {t.id for t in study.trials.values() if str(t.state) in ("pruned", "failed", "out_of_memory")}
    assert {one.trial for one in found.ruled_out} == ended_badly != set()
    assert all(one.reason for one in found.ruled_out)
    complete = {t.id for t in study.trials.values() if str(t.state) == "complete"}
    assert {one.trial for one in found.alternatives} == complete - {found.evidence.trial}
    losses = [one.val_loss for one in found.alternatives if one.val_loss is not None]
    assert losses == sorted(losses)
    assert len(losses) == len(found.alternatives)


def test_of_several_seeds_figures_are_means_and_each_configuration_stands_once(tmp_path: Path) -> None:
    """The second seed ends higher and takes more memory; at high rates it diverges, so that these are no alternatives."""

    def world(config: TrialConfig, samples: int) -> dict[str, Any]:
        point, is_too_high = (
            IDEAL(config, samples),
            config.learning_rate > 1.5e-3 * (config.effective_batch_size / 8) ** 0.5,
        )
        loss = math.nan if config.seed and is_too_high else point["val_loss"] + 0.1 * config.seed
        return point | {"loss": loss, "val_loss": loss, "peak_memory_bytes": (1 + config.seed) * MIB}

    config = study_of(stages=STAGES[:1], sample_budget=4096, seeds=[0, 1])
    study = play_study(tmp_path / "journal.jsonl", config, world, found=(RATES,))
    found = recommendation_of(config, study)
    told = [study.seeds_of(study.trials[one.trial]) for one in (found.evidence, *found.alternatives)]
    assert all(len(seeds) == 2 and {str(seed.state) for seed in seeds} == {"complete"} for seeds in told)
    assert len({seeds[0].candidate for seeds in told}) == len(told) > 1
    for one, seeds in zip((found.evidence, *found.alternatives), told, strict=True):
        assert one.val_loss == pytest.approx(statistics.fmean(seed.measured("val_loss") for seed in seeds))
    assert found.evidence.peak_memory_bytes == 2 * MIB
    assert f"val loss {loss_text(found.evidence.val_loss or 0)}" in found.verdict


def test_accumulate_1_and_your_own_batch_stays(tmp_path: Path) -> None:
    """Batch 8 is the user's, and the larger ones waste what they train on."""
    found, _ = recommended(tmp_path / "journal.jsonl", LossWorld(noise_scale=10, half_speed_batch=6))
    assert (found.micro_batch_size, found.gradient_accumulation_steps) == (8, 1)
    assert found.p_best is not None
    assert found.p_best == max(0.5, found.p_best)


def test_undetermined_recommends_nothing_and_leaves_no_file(tmp_path: Path) -> None:
    config = study_of(stages=STAGES[:1])
    with Journal(tmp_path / "journal.jsonl", config.name) as journal:
        study = Player(director_of(config, journal, "train"), failing(IDEAL, lambda _: True)).play()
    assert recommend(config, study) is None
    (tmp_path / "recommendation.json").write_text("{}")  # of before what it rests on was run again
    write_recommendation(tmp_path / "recommendation.json", None)
    assert not (tmp_path / "recommendation.json").exists()


def test_the_file_is_json_and_the_same_again_from_the_journal(tmp_path: Path) -> None:
    config, study = whole_study(tmp_path / "journal.jsonl")
    write_recommendation(tmp_path / "recommendation.json", recommend(config, study))
    first = (tmp_path / "recommendation.json").read_bytes()
    write_recommendation(
        tmp_path / "recommendation.json", recommend(config, replay(tmp_path / "journal.jsonl", "played"))
    )
    assert (tmp_path / "recommendation.json").read_bytes() == first
    json.loads(first, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert {path.name for path in tmp_path.iterdir()} == {".lease", "journal.jsonl", "recommendation.json"}


def test_it_can_be_asked_at_every_moment_of_a_study(tmp_path: Path) -> None:
    """While it runs it says so: complete is false until every stage has ended."""
    config, _ = whole_study(tmp_path / "journal.jsonl")
    lines = (tmp_path / "journal.jsonl").read_bytes().splitlines(keepends=True)
    found = []
    for kept in range(len(lines) + 1):
        (tmp_path / "cut.jsonl").write_bytes(b"".join(lines[:kept]))
        found.append(recommend(config, replay(tmp_path / "cut.jsonl", "played")))
    assert found[0] is None
    complete = [one.complete for one in found if one]
    assert complete == sorted(complete)
    assert set(complete) == {False, True}


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.parent.name)
def test_a_file_of_the_version_before_is_read_and_written_again_as_it_is(file: Path) -> None:
    text = file.read_text()
    assert json.dumps(Recommendation.from_json(text).to_json(), indent=2) + "\n" == text
    before = {key: value for key, value in json.loads(text).items() if key not in ("scope", "undecided_between")}
    gone = {"verdict_parts": {"answer": "", "why": "", "warnings": [], "holds_for": ""}}
    assert Recommendation.from_json(json.dumps(before | gone)).to_json() == before | {"undecided_between": []}


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"micro_batch_size": 4}'])
def test_a_file_that_is_no_recommendation_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a recommendation.json.*write it again: batchscout report"):
        Recommendation.from_json(text)


def test_what_is_as_usual_and_what_was_not_measured_is_absent_from_the_file() -> None:
    tree = example_recommendation().to_json()
    assert "cross_entropy" not in tree
    assert example_recommendation(cross_entropy="chunked").to_json()["cross_entropy"] == "chunked"
    assert isinstance(tree["evidence"], dict)
    assert tree["evidence"].keys() == {"trial", "val_loss", "tokens_per_second", "peak_memory_bytes", "stages", "notes"}


@pytest.mark.parametrize(
    ("data", "sample"),
    [
        ({"target": "text"}, Sample(TEXT_SEQ_LEN, "text")),
        ({"target": "python_stdlib", "kwargs": {"seq_len": 64}}, Sample(64, "text")),
        ({"target": "chat", "kwargs": {"seq_len": 64, "longer": "cut"}}, Sample(64, "cut")),
        ({"target": "chat", "kwargs": {"seq_len": 64, "longer": "leave_out"}}, Sample(64, "leave_out")),
        ({"target": "chat", "kwargs": {"seq_len": 64}}, None),  # longer ones are refused
        ({"target": "my.data:sets", "kwargs": {"seq_len": 64}}, None),
        ({"target": "chat", "pad": {"input_ids": 0, "targets": -100}, "pack": 96}, Sample(96, "pack")),
    ],
)
def test_what_a_sample_is_is_told_where_it_is_not_one_of_the_data(data: dict[str, Any], sample: Sample | None) -> None:
    study = example_study(config := example_config(data=data))
    assert recommendation_of(config, study).sample == sample


@pytest.mark.parametrize("own_run", [None, OwnRun("script", 6000)])
def test_beside_the_users_own_run_stands_what_their_setting_trains_on_in_the_study(own_run: OwnRun | None) -> None:
    study = example_study(config := example_config())
    tell(study, FactsRead(facts=Facts(own_run=own_run)))
    found = recommendation_of(config, study)
    assert found.study_sample_budget == (None if own_run is None else config.sample_budget)


def test_the_tuned_learning_rate_goes_before_the_trained_batch_and_that_before_the_grid() -> None:
    """Whatever the order of the stages in the study file."""
    config = example_config(stages=[{"type": "train"}, {"type": "learning_rate"}, {"type": "grid"}])
    study = Study(config.name)
    for findings in (
        GridFindings("grid-a", 3.0),
        TrainFindings("train-a", 4.0),
        LearningRateFindings(1e-3, "learning_rate-a", on_edge=False, losses={}),
    ):
        add_trial(study, config, findings.winner)
        end_trial(study, findings.winner, 1.0, {"val_loss": 3.0})
        conclude(study, findings, "")
        found = recommendation_of(config, study)
        assert found.evidence.trial == findings.winner
