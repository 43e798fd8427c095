"""The key `from` stands for model, data and loss; what the study file says itself comes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from batchscout.orchestrator.config import sources
from batchscout.orchestrator.config.keys import Batch
from batchscout.orchestrator.config.load import load_study
from batchscout.orchestrator.config.sources import From, with_source
from batchscout.orchestrator.config.trial import baseline_batch
from batchscout.trainers.before.source import Source
from batchscout.trainers.sources.settings import GROUPS, Settings

MAKE = "my.script:make_trainer"
SAID = {
    "model": {"target": MAKE, "kwargs": {}},
    "data": {"target": MAKE, "kwargs": {}},
    "optimizer": {"lr": 0.1, "type": "sgd", "betas": [0.9, 0.0], "param_groups": GROUPS, "reference_batch_size": 16, "max_gradient_norm": None},
    "precision": "bfloat16",
    "schedule": {"type": "cosine"},
    "batch": {"micro_batch_size": 8},
}  # fmt: skip


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    """Says SAID of whatever it is asked, since the process that reads is tested by itself."""
    asked = list[Source]()

    def read(source: Source) -> Settings:
        asked.append(source)
        return Settings(SAID, ("its schedule is another",), run_samples=40_000)

    monkeypatch.setattr(sources, "read_source", read)
    return asked


def study(tmp_path: Path, **keys: Any) -> Any:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({"from": {"transformers": MAKE}, **keys}))
    return load_study(path, [])


def test_it_says_what_the_study_file_leaves_open(tmp_path: Path, reading: list[Source]) -> None:
    config = study(tmp_path, optimizer={"lr": 0.3}, model={"blocks": "layers"})
    assert (config.model.target, config.model.blocks, config.data.target) == (MAKE, "layers", MAKE)
    assert (config.optimizer.type, config.optimizer.lr, config.optimizer.reference_batch_size) == ("sgd", 0.3, 16)
    assert (config.precision, config.schedule.type) == ("bfloat16", "cosine")
    assert config.sample_budget == 32_768, "its own run is longer than a study's by default"
    assert reading == [Source("transformers", MAKE, {})]


@pytest.mark.parametrize(
    ("keys", "expected", "effective"),
    [
        ({}, Batch(micro_batch_size=8, effective_batch_size=16), 16),
        ({"world_size": 4}, Batch(micro_batch_size=4, effective_batch_size=16), 16),
        ({"optimizer": {"reference_batch_size": 18}}, Batch(micro_batch_size=6, effective_batch_size=18), 18),
        ({"world_size": 3}, Batch(), 16),
        ({"batch": {"micro_batch_size": 8}}, Batch(micro_batch_size=8, effective_batch_size=16), 16),
        ({"batch": {"micro_batch_size": 4}}, Batch(micro_batch_size=4, effective_batch_size=16), 16),
        ({"batch": {"gradient_accumulation_steps": 4}}, Batch(micro_batch_size=4, gradient_accumulation_steps=4), 16),
        ({"batch": {"effective_batch_size": 32}}, Batch(effective_batch_size=32), 32),
        ({"batch": (split := {"micro_batch_size": 2, "gradient_accumulation_steps": 3})}, Batch(**split), 6),
    ],
)
def test_its_batch_is_the_studys_in_its_own_micro_batches(
    tmp_path: Path, reading: list[Source], keys: dict[str, Any], expected: Batch, effective: int
) -> None:
    """And stays so where the study file gives the split alone."""
    config = study(tmp_path, **keys)
    assert (config.batch, baseline_batch(config)) == (expected, effective)


@pytest.mark.parametrize(
    ("keys", "schedule", "warmup"),
    [
        ({}, ("table", (0.1, 1.0, 0.5)), 0),
        ({"schedule": "cosine"}, ("cosine", ()), "auto"),
        ({"schedule": "cosine", "optimizer": {"warmup": 64}}, ("cosine", ()), 64),
        ({"optimizer": {"type": "muon"}}, ("table", (0.1, 1.0, 0.5)), 0),
        ({"optimizer": "muon", "schedule": {"type": "constant"}}, ("constant", ()), "auto"),
    ],
)
def test_its_warm_up_belongs_to_its_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], schedule: tuple[str, Any], warmup: object
) -> None:
    """A schedule that the study file names is taken alone, with a warm-up of its own; another optimizer keeps the object's schedule."""
    said = SAID | {
        "optimizer": SAID["optimizer"] | {"warmup": 0},
        "schedule": {"type": "table", "factors": [0.1, 1, 0.5]},
    }
    monkeypatch.setattr(sources, "read_source", lambda _: Settings(said, ()))
    config = study(tmp_path, **keys)
    assert ((config.schedule.type, config.schedule.factors), config.optimizer.warmup) == (schedule, warmup)


def test_an_optimizer_that_the_study_file_names_is_its_own_alone(tmp_path: Path, reading: list[Source]) -> None:
    optimizer = study(tmp_path, optimizer={"type": "muon"}, sample_budget=100).optimizer
    assert (optimizer.type, optimizer.lr, optimizer.param_groups) == ("muon", 0.1, None)
    assert (optimizer.reference_batch_size, optimizer.betas) == (16, (0.9, 0.95))


def test_what_is_otherwise_is_told(reading: list[Source]) -> None:
    told = list[str]()
    keys = {
        "sample_budget": 40_000,
        "optimizer": {"lr": 0.1, "betas": [0.5, 0.0]},
        "precision": "float32",
        "schedule": {"decay": 0.1},
    }
    with_source({"from": {"lightning": "a:b"}, **keys}, told.append)
    assert told == [
        "from lightning a:b: its schedule is another",
        "from lightning a:b: optimizer.betas is [0.5, 0.0] in the study file, and [0.9, 0.0] in it",
        "from lightning a:b: precision is float32 in the study file, and bfloat16 in it",
    ]


@pytest.mark.parametrize(
    ("in_steps", "optimizer", "samples", "told_of_ranks"),
    [(True, {}, 40_000, True), (True, {"reference_batch_size": 64}, 160_000, False), (False, {"reference_batch_size": 64}, 40_000, False)],
)  # fmt: skip
def test_of_several_ranks_it_is_told_whose_samples_a_step_takes_and_what_counts_steps_takes_more(
    monkeypatch: pytest.MonkeyPatch, in_steps: bool, optimizer: dict[str, Any], samples: int, told_of_ranks: bool
) -> None:
    monkeypatch.setattr(sources, "read_source", lambda _: Settings(SAID, (), 40_000, in_steps))
    told = list[str]()
    with_source(
        {"from": {"lightning": "a:b"}, "world_size": 4, **({"optimizer": optimizer} if optimizer else {})}, told.append
    )
    assert any(f"its run takes {samples:,} samples" in one for one in told)
    assert any("set optimizer: {reference_batch_size: 64}" in one for one in told) == told_of_ranks


@pytest.mark.parametrize(
    ("processes", "world_size", "told"),
    [(8, 1, "set world_size: 8"), (8, 8, ""), (1, 8, "set optimizer: {reference_batch_size: 128}"), (1, 1, "")],
)
def test_a_trainer_of_several_processes_says_how_many_a_study_has(
    monkeypatch: pytest.MonkeyPatch, processes: int, world_size: int, told: str
) -> None:
    monkeypatch.setattr(sources, "read_source", lambda _: Settings(SAID, (), 100, processes=processes))
    said = list[str]()
    with_source({"from": {"lightning": "a:b"}, "world_size": world_size}, said.append)
    assert [one for one in said if "world_size" in one or "ranks" in one] == [
        one for one in said if told and told in one
    ]
    assert bool(said) is bool(told)


@pytest.mark.parametrize(
    ("schedule", "is_told"), [({"type": "table", "factors": [0, 1]}, True), ({"type": "cosine"}, False)]
)
def test_a_schedule_that_counts_steps_is_told_where_a_step_has_more_samples(
    monkeypatch: pytest.MonkeyPatch, schedule: dict[str, Any], is_told: bool
) -> None:
    monkeypatch.setattr(sources, "read_source", lambda _: Settings(SAID | {"schedule": schedule}, (), 100))
    said = list[str]()
    with_source({"from": {"lightning": "a:b"}, "optimizer": {"reference_batch_size": 128}}, said.append)
    assert (
        any(
            "its schedule was followed over the steps of 16 samples each; with 128 a step there are fewer" in one
            for one in said
        )
        is is_told
    )


def test_a_run_that_the_study_shortens_is_told_with_the_key_that_carries_the_answer_to_it(
    reading: list[Source],
) -> None:
    told, carried = list[str](), list[str]()
    with_source({"from": {"lightning": "a:b"}}, told.append)
    assert "its run takes 40,000 samples, and full runs of the study 32,768, " in told[1]
    assert "real_run: {samples: 40000}" in told[1]
    with_source({"from": {"lightning": "a:b"}, "real_run": {"samples": 40_000}}, carried.append)
    assert len(carried) == 1


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"loss": "mse"}, "the study file has from and loss, which from stands for; leave one of them out"),
        ({"model": {"target": "gpt"}, "data": {"target": "text"}}, "has from and data and model, which from stands for"),
        ({"from": {}}, "from: from names nothing; name one of lightning, transformers, script"),
        ({"from": {"lightning": "a:b", "transformers": "a:b"}}, "from names lightning and transformers; name one of lightning, transformers, script"),
        ({"from": {"lightning": "a:b", "args": ["--lr"]}}, "from.args are those of a script; give a callable its arguments as kwargs"),
        ({"from": {"script": "train.py", "kwargs": {"lr": 1}}}, "from.kwargs are those of a callable; give a script its arguments as args"),
        ({"from": {"lightening": "a:b"}}, r"from.lightening: no such key; did you mean lightning\? The keys here are: lightning, transf"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(
    tmp_path: Path, reading: list[Source], keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        study(tmp_path, **keys)
    assert not reading


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("tests.config.test_sources:nowhere", "from.lightning tests.config.test_sources:nowhere: .* 'tests.config.test_sources' has no 'nowhere'"),
        ("tests.config.test_sources:raises", r"raised OSError: no such disk \(in .*test_sources.py, line \d+\); fix it, or debug it by"),
        ("tests.config.test_sources:exits", "its process ended with exit code 3: "),
        ("tests.config.test_sources:takes", r"from.kwargs do not fit: missing a required argument: 'width'; it takes: width"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_what_cannot_be_made_is_said_in_the_users_words(tmp_path: Path, make: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        study(tmp_path, **{"from": {"lightning": make}})


def raises() -> None:
    raise OSError("no such disk")


def exits() -> None:
    raise SystemExit(3)


def takes(width: int) -> None: ...


def test_the_arguments_of_a_script_are_text_whether_or_not_they_are_quoted() -> None:
    given = yaml.safe_load("{script: train.py, args: [--lr, '1e-3', --epochs, 3, --decay, 0.1]}")
    assert From.model_validate(given).args == ("--lr", "1e-3", "--epochs", "3", "--decay", "0.1")
