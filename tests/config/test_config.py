"""What a study file may say, and what is answered to one that says it wrongly."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import math
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from batchscout.orchestrator.config.keys import Batch, StudyConfig, given_batch
from batchscout.orchestrator.config.load import load_study, parse_study, read_yaml, written_yaml
from batchscout.orchestrator.config.stages import AshaPruner, Frontier, Grid, StageKeys
from batchscout.orchestrator.config.trial import (
    base_trial,
    evenly_spaced,
    optimizer_at,
    precisions,
    rises_until,
    scaled_learning_rate,
    uses_compile,
    warmup_samples,
)
from batchscout.orchestrator.study.run_directory import load_stored_study
from batchscout.trainers.config import OptimizerConfig, Split
from batchscout.trainers.strict import Strict
from tests.support.every import for_every
from tests.support.lane_player import study_of

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
MINIMAL = "model: {target: gpt}\ndata: {target: python_stdlib}\n"


def load(folder: Path, text: str = "", *overrides: str) -> StudyConfig:
    path = folder / "study.yaml"
    path.write_text(MINIMAL + text)
    return load_study(path, list(overrides))


def refusal(folder: Path, text: str = "", *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is what the callers test)
        load(folder, text, *overrides)
    assert "Traceback" not in str(caught.value)
    assert "pydantic" not in str(caught.value)
    return str(caught.value)


def nullable(owner: type[Strict]) -> list[str]:
    """The keys that may be null."""
    return [name for name, field in owner.model_fields.items() if type(None) in get_args(field.annotation)]


# Whatever stands under whatever key, no word of pydantic's reaches the user

WRONG: list[Any] = [
    "word",
    7,
    -1,
    0.5,
    float("inf"),
    2**70,
    True,
    None,
    [],
    ["word"],
    [[]],
    [None],
    {},
    {"type": "word"},
    {"word": 1},
]


def places_of(owner: type[Strict], prefix: str = "") -> Iterator[str]:
    for name, field in owner.model_fields.items():
        yield prefix + name
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        for section in (kind for kind in kinds if issubclass(kind, Strict)):
            yield from places_of(section, f"{prefix}{name}.")


def faults_of_every_kind() -> Iterator[str]:
    stages = {kind.model_fields["type"].default: kind for kind in get_args(StageKeys)}
    keys = [
        *places_of(StudyConfig),
        *(f"stages.{name}.{key}" for name, kind in stages.items() for key in places_of(kind)),
    ]
    for key in keys:
        for value in WRONG:
            tree = {"name": "s", "model": {"target": "gpt"}, "data": {"target": "python_stdlib"}}
            tree["stages"] = [{"type": name} for name in stages]
            put(tree, key.split("."), deepcopy(value))
            try:
                parse_study(tree, "it")
            except ValueError as error:
                yield str(error)


def put(tree: Any, path: list[str], value: object) -> None:
    *parents, last = path
    for name in parents:
        found = (
            tree.setdefault(name, {}) if isinstance(tree, dict) else next(one for one in tree if one["type"] == name)
        )
        tree = found
    tree[last] = value


def test_a_fault_is_never_told_in_the_words_of_a_library() -> None:
    said = list(faults_of_every_kind())
    assert len(said) > 500
    for words in (
        "Input",
        "valid",
        "item",
        "Tuple",
        "instance of",
        "literal[",
        "constrained",
        "something else",
        "stages.0.",
        "change it",
    ):
        assert [one for one in said if words in one.replace("validation", "").replace("invalid", "")] == []


@pytest.mark.parametrize(("override", "words"), [
    ("stages=[{smallest: 1}]", "stages.0: has no type; add one of frontier, throughput, equivalence, train, learning_rate, "),
    ("stages.train.pruner={}", "stages.train.pruner: has no type; add one of none, asha"),
    ("stages.train.pruner={type: hyperband}", "stages.train.pruner: it is of the type 'hyperband', and takes none or asha; write one of these"),
    ("stages.frontier.activation_checkpointing=[fulll]", "it is 'fulll', and takes none, selective or full or a number; did you mean full?"),
    ("optimizer.betas=3", "optimizer.betas: it is 3, and takes a list; write 2 members, such as [0.9, 0.95]"),
    ("optimizer.betas=[0.9]", "optimizer.betas.1: the list ends before it; write 2 members, such as [0.9, 0.95]"),
    ("optimizer.betas=[0.9, 1, 2]", "optimizer.betas: it is [0.9, 1, 2], and takes at most 2 members; write 2 members, such as [0.9, 0.95]"),
    ("optimizer.betas=[0.9, a]", "optimizer.betas.1: it is 'a', and takes a number; write it in digits"),
    ("optimizer.warmup=soon", "optimizer.warmup: it is 'soon', and takes auto or short or a whole number; write one of these"),
    ("seeds=3", "seeds: it is 3, and takes a list; for 3 seeds write [0, 1, 2], and for the seed 3 alone [3]"),
    ("seeds=three", "write whole numbers, such as [0, 1, 2]"),
    ("seeds=[true]", "seeds has true, which is no number; write the number"),
    ("seeds=[-1]", "seeds.0: it is -1, and takes at least 0; raise it"),
    ("real_run=1e6", "write {samples: 1000000}"),
    ("budget=2h", "write {device_hours: 2}"),
    ("budget=1.2.3h", "write the hours, such as {device_hours: 2}"),
    ("budget=90 min", "write {device_hours: 1.5}"),
    ("max_runs=4", "max_runs: no such key; write stages.train.max_runs"),
    ("batch=32", "write {effective_batch_size: 32}"),
    ("budget=2", "write {device_hours: 2}"),
    ("model=gpt", "write {target: gpt}"),
    ("stages=[{frontier: {steps: 5}}]", "stages.0: has no type; write type: frontier beside its keys"),
    ("stages=[frontire]", "did you mean frontier?"),
    ("schedule=wsd", "did you mean warmup_stable_decay?"),
    ("schedule=linear", "a straight fall is {type: table, factors: [1, 0]}, with optimizer.warmup: 0"),
    ("stages=[lr]", "did you mean learning_rate?"),
    ("precision=BFloat16", "did you mean bfloat16?"),
    ("precision=fp32", "write float32"),
    ("learning_rate=0.1", "write optimizer.lr"),
    ("optimizer.learning_rate=0.1", "write optimizer.lr"),
    ("optimizer.name=sgd", "write optimizer.type"),
    ("batch_size=8", "write batch.effective_batch_size"),
    ("micro_batch_size=8", "write batch.micro_batch_size"),
    ("epochs=3", "write sample_budget (in samples"),
    ("data=3", "data: it is 3, and takes keys of its own; write them below it, or in braces"),
    ("optimizer.lr=.inf", "optimizer.lr: it is inf, and takes a finite number; write it in digits"),
    ("deterministic=maybe", "deterministic: it is 'maybe', and takes true or false; write one of these"),
    ("sample_budget=", "sample_budget: it is null, and takes a whole number; give it a value, or leave the key out"),
    ("model.target=7", "model.target: it is 7, and takes text; write '7'"),
    # what people type by habit
    ("memory_limit=80%", "write an amount with a unit, such as 16GiB"),
    ("memory_limit=16", "write an amount with a unit, such as 16GiB"),
    ("memory_limit=3 GiB, or so", "write an amount with a unit, such as 16GiB"),
    ("model=gpt2", "write {target: hf, kwargs: {name: gpt2, pretrained: true}}"),
    ("model=mine:Net", "write {target: mine:Net}"),
    ("data=org/texts", "write {target: hf, kwargs: {path: org/texts}}"),
    ("model={target: hf, name: gpt2}", "write model.kwargs.name, with model.target: hf"),
    ("data={target: text, max_seq_len: 8}", "write data.kwargs.seq_len, where data.target takes it"),
    ("model.dropout=0.1", "write model.kwargs.dropout"),
    ("model.blokcs=h", "did you mean blocks?"),
    ("data.batch_size=8", "write batch.effective_batch_size"),
    ("real_run={epochs: 3}", "write real_run.samples (in samples: epochs x training samples"),
    ("budget={hours: 2}", "write budget.device_hours"),
    ("steps=1000", "write sample_budget (in samples: epochs x training samples, steps x batch)"),
    ("max_steps=1000", "write sample_budget (in samples"),
    ("bf16=true", "write precision: bfloat16"),
    ("grad_accum=4", "write batch.gradient_accumulation_steps"),
    ("accumulate_grad_batches=4", "write batch.gradient_accumulation_steps"),
    ("output_dir=out", "write --dir RUN_DIR on the command line"),
    ("gpus=4", "write world_size, the GPUs of one trial, or placement.lanes, the trials at once"),
    ("max_seq_len=512", "write data.kwargs.seq_len"),
    ("warmup_ratio=0.1", "write optimizer.warmup (in samples: steps x batch, a share x sample_budget)"),
    ("optimizer.momentum=0.9", "write optimizer.betas: [0.9, 0.95], whose first is SGD's momentum"),
    ("precision=bf16-mixed", "write bfloat16"),
    ("precision=16-mixed", "write float16"),
    ("precision=32", "write float32"),
    ("activation_checkpointing=true", "write full"),
    ("activation_checkpointing=false", "write none"),
    ("optimizer.warmup=100 steps", "write a whole number (in samples: steps x batch"),
    ("optimizer.warmup=10%", "write a whole number (in samples: steps x batch, a share x sample_budget)"),
    ("headroom=10", "for 10% write 0.1"),
    ("sample_budget=10k", "write 10000"),
    ("sample_budget='1_000,000'", "write 1000000"),
    ("sample_budget=0.1", "write a whole number (in samples"),
    ("stages={frontier: {}}", "write [{type: frontier}]"),
    ("stages={frontier: {steps: 5}, train: {}}", "write [{type: frontier}, {type: train}], with the keys of each beside its type"),
    ("seeds=1", "for 1 seed write [0], and for the seed 1 alone [1]"),
    ("seed=1", "write seeds, a list such as [0, 1, 2]"),
])  # fmt: skip
def test_a_fault_says_what_stands_there_and_what_may_and_the_remedy(tmp_path: Path, override: str, words: str) -> None:
    (line,) = refusal(tmp_path, "", override).splitlines()[1:]
    assert words in line


@pytest.mark.parametrize("limit", ["1000000", "2MiB", "1.5 GiB", "900_000_000", "100KiB"])
def test_an_amount_of_memory_has_a_unit_or_is_as_many_bytes_as_a_model_takes(tmp_path: Path, limit: str) -> None:
    assert (load(tmp_path, "", f"memory_limit={limit}").memory_limit or 0) >= 100 * 2**10


@pytest.mark.parametrize(("override", "place"), [
    ("stages.frontier.larges=3", "stages.frontier.larges"),
    ("stages.train.pruner={type: asha, min_sample: 1}", "stages.train.pruner.min_sample"),
    ("stages.frontier.activation_checkpointing=[fulll]", "stages.frontier.activation_checkpointing.0"),
    ("budget={device_hours: 0}", "budget.device_hours"),
    ("optimizer.warmup=soon", "optimizer.warmup"),
])  # fmt: skip
def test_the_place_of_a_fault_is_what_set_takes(tmp_path: Path, override: str, place: str) -> None:
    (line,) = refusal(tmp_path, "", override).splitlines()[1:]
    assert line.strip().partition(": ")[0] == place
    assert place.rpartition(".")[2] in refusal(tmp_path, "", override, f"{place}=[[]]"), "it leads to the same place"


# What is understood


def test_model_and_data_are_all_that_is_needed(tmp_path: Path) -> None:
    study = load(tmp_path)
    assert study.name == "study", "the file's"
    assert [stage.type for stage in study.stages] == ["frontier", "throughput", "equivalence", "train"]


@for_every(path=CONFIGS)
def test_every_file_in_configs_is_a_study(path: Path) -> None:
    study = load_study(path, [])
    assert parse_study(study.model_dump(mode="json"), "again") == study


@for_every(path=CONFIGS)
def test_a_resolved_study_survives_its_file(tmp_path: Path, path: Path) -> None:
    """study.yaml of a run directory: what is written is what is read."""
    resolved = load_study(path, []).model_dump(mode="json")
    (tmp_path / "study.yaml").write_text(written_yaml(resolved))
    assert read_yaml(tmp_path / "study.yaml") == resolved


@pytest.mark.parametrize(("text", "place", "value"), [
    ("tracking: {wandb: off}", ("tracking", "wandb"), "off"),
    ("tracking: {wandb: offline}", ("tracking", "wandb"), "offline"),
    ("optimizer: {lr: 6e-4}", ("optimizer", "lr"), 6e-4),
    ("optimizer: {lr: 6.0E-4}", ("optimizer", "lr"), 6e-4),
    ("headroom: 5%", ("headroom",), 0.05),
    ("headroom: 0.1", ("headroom",), 0.1),
    ("memory_limit: 1.5GiB", ("memory_limit",), 3 * 2**29),
    ("memory_limit: 224MiB", ("memory_limit",), 224 * 2**20),
    ("memory_limit: 1_000_000", ("memory_limit",), 1_000_000),
    ("memory_limit: null", ("memory_limit",), None),
    ("sample_budget: 32_768", ("sample_budget",), 32_768),
    ("schedule: {decay: 20%}", ("schedule", "decay"), 0.2),
])  # fmt: skip
def test_numbers_and_words_are_read_as_they_are_meant(tmp_path: Path, text: str, place: Any, value: object) -> None:
    found: Any = load(tmp_path, text)
    for name in place:
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value) or isinstance(found, int)


def test_a_number_within_a_targets_own_keys_is_a_number_and_a_name_stays_a_name(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        "model: {target: gpt, kwargs: {eps: 1e-5, name: e5-base, other: 1e, text: '1e-3'}}\ndata: {target: python_stdlib}\n"
    )
    expected = {"eps": 1e-5, "name": "e5-base", "other": "1e", "text": "1e-3"}
    study = load_study(path, [])
    assert study.model.kwargs == expected
    path.write_text(written_yaml(study.model_dump(mode="json")))
    assert load_study(path, []).model.kwargs == expected, "text stays text in the study.yaml of a run directory"


def test_relative_paths_become_absolute_and_hub_names_stay(home: Path) -> None:
    (home / "folder").mkdir()
    path = home / "s.yaml"
    path.write_text(
        "model: {target: gpt}\ndata: {target: text, kwargs: {train: [a.txt, b/*.txt], val: v.txt, tokenizer: gpt2}}\n"
    )
    found = load_study(path, []).data.kwargs
    assert found == {
        "train": [f"{home}/a.txt", f"{home}/b/*.txt"], "val": f"{home}/v.txt", "tokenizer": "gpt2"
    }  # fmt: skip
    path.write_text("model: {target: hf, kwargs: {name: folder}}\ndata: {target: hf, kwargs: {path: wikitext}}\n")
    study = load_study(path, [])
    assert study.model.kwargs == {"name": f"{home}/folder"}, "such a folder is there"
    assert study.data.kwargs == {"path": "wikitext"}, "no such folder: a name on the hub"


@pytest.mark.parametrize(("path", "data_files", "absolute"), [
    ("json", "a/*.json", "{}/a/*.json"),
    ("csv", ["a.csv", "/b.csv"], ["{}/a.csv", "/b.csv"]),
    ("parquet", {"train": "a", "validation": ["b"]}, {"train": "{}/a", "validation": ["{}/b"]}),
    ("parquet", "hf://datasets/of/one/a.parquet", "hf://datasets/of/one/a.parquet"),
    ("owner/name", "a.json", "a.json"),
])  # fmt: skip
def test_files_of_a_format_become_absolute_and_those_of_a_data_set_stay_within_it(
    home: Path, path: str, data_files: object, absolute: object
) -> None:
    (home / "json").mkdir()  # load_dataset takes the format all the same
    kwargs = json.dumps({"path": path, "data_files": data_files})
    study = home / "s.yaml"
    study.write_text(f"model: {{target: gpt}}\ndata: {{target: hf, kwargs: {kwargs}}}\n")
    expected = json.loads(json.dumps(absolute).replace("{}", str(home)))
    assert load_study(study, []).data.kwargs == {"path": path, "data_files": expected}


def test_a_users_own_callable_gets_its_arguments_untouched(home: Path) -> None:
    path = home / "s.yaml"
    path.write_text("model: {target: gpt}\ndata: {target: 'my.data:sets', kwargs: {train: a.txt}}\n")
    assert load_study(path, []).data.kwargs == {"train": "a.txt"}


@pytest.mark.parametrize(("override", "place", "value"), [
    ("optimizer.lr=3e-4", "optimizer.lr", 3e-4),
    ("seeds=[1, 2]", "seeds", (1, 2)),
    ("model.kwargs.num_layers=3", "model.kwargs", {"num_layers": 3}),
    ("stages.0.smallest=4", "stages.0.smallest", 4),
    ("stages.train.pruner.type=none", "stages.1.pruner.type", "none"),
    ("tracking.wandb=off", "tracking.wandb", "off"),
    ("name=other", "name", "other"),
])  # fmt: skip
def test_set_changes_one_key(tmp_path: Path, override: str, place: str, value: object) -> None:
    found: Any = load(tmp_path, "stages: [{type: frontier}, {type: train}]\n", override)
    for name in place.split("."):
        found = found[int(name)] if name.isdigit() else getattr(found, name)
    assert found == value


# What is refused


def test_what_init_left_to_be_filled_in_is_named_by_its_places(tmp_path: Path) -> None:
    (file := tmp_path / "study.yaml").write_text(
        "model: {target: 'mine:Net', kwargs: {width: FILL_IN}}\ndata: {target: FILL_IN}\nstages: [{type: grid, micro_batch_size: [FILL_IN]}]"
    )
    with pytest.raises(
        ValueError,
        match=r"still says FILL_IN at model.kwargs.width, data.target, stages.0.micro_batch_size.0; fill them in",
    ):
        load_study(file, [])
    load_study(file, ["model.kwargs.width=3", "data.target=text", "stages.0.micro_batch_size=[4]"])


@pytest.mark.parametrize(("text", "said"), [
    ("optimiser: {lr: 1}", r"optimiser: no such key; did you mean optimizer\? batchscout schema study names all \d\d keys$"),
    ("colour: red", r"colour: no such key; the keys here are: name, model, .*stages$"),
    ("name: a/b", r"name: 'a/b' cannot be a directory below runs/: it has a slash in it; choose a name such as gpt-small$"),
    ("name: -v", r"it begins with a dot or a dash"),
    ("name: ' '", r"it begins or ends with a space"),
    ("name: " + 101 * "ß", r"it is longer than 200 bytes"),
    ("sample_budget: true", r"sample_budget is true, which is no number; write the number$"),
    ("memory_limit: false", r"memory_limit is false, which is no number; write the number$"),
    ("stages: [{type: train, max_runs: true}]", r"stages.train: max_runs is true, which is no number"),
    ("optimizer: {learning_rate: 1}", r"optimizer.learning_rate: no such key; write optimizer.lr$"),
    ("stages: [{type: train, prune: 1}]", r"stages.train.prune: no such key; did you mean pruner\? The keys here are: type, pruner"),
    ("stages: [{type: train, pruner: {type: asha, eta: 3}}]", r"eta: no such key; .*type, min_samples, reduction_factor"),
    ("stages: [{type: fronteer}]", r"stages.0: it is of the type 'fronteer', and takes frontier, throughput, .*; did you mean frontier\?$"),
    ("stages: [{type: frontier, activation_checkpointing: []}]", r"at least one member; add one$"),
    ("stages: []", r"stages: .*at least one member; add one$"),
    ("regime: finetune\nsample_budget: 512\nstages: []", r"stages: .*at least one member; add one$"),
    ("real_run: {samples: 4096}\nstages: 3", r"stages: it is 3, and takes a list"),
    ("sample_budget: many", r"sample_budget: it is 'many', and takes a whole number; write it in digits$"),
    ("world_size: 0", r"world_size: it is 0, and takes more than 0; raise it$"),
    ("sample_budget: 100000000000000000000", r"sample_budget: it is 10{20}, and takes less than 9007199254740992; lower it$"),
    ("seeds: [0, 1180591620717411303424]", r"seeds.1: it is 1180591620717411303424, and takes less than 4294967296; lower it$"),
    ("headroom: 150%", r"headroom: it is '150%', and takes less than 1; lower it$"),
    ("memory_limit: 0", r"memory_limit: it is 0, and takes more than 0; raise it$"),
    ("memory_limit: 3 bananas", r"memory_limit: it is '3 bananas', and takes an amount of memory; write 512MiB or 1.5GiB$"),
    ("optimizer: {lr: -1}", r"optimizer.lr: it is -1, and takes more than 0.*; raise it$"),
    ("optimizer: {lr: .nan}", r"optimizer.lr: .*; write it in digits$"),
    ("tracking: {wandb: on}", r"tracking.wandb: it is true, and takes off, offline or online; write one of these$"),
    ("batch: {micro_batch_size: 3, effective_batch_size: 32}",
     r"effective_batch_size \(32\) is not a multiple of micro_batch_size x world_size \(3 x 1 = 3\); choose a multiple of 3$"),
    ("world_size: 4\nbatch: {micro_batch_size: 3, effective_batch_size: 32}", r"\(32\).*\(3 x 4 = 12\); choose a multiple"),
    ("batch: {micro_batch_size: 4, gradient_accumulation_steps: 3, effective_batch_size: 32}",
     r"gradient_accumulation_steps \(3\).*makes it 8; leave one of them out$"),
    ("sample_budget: 7\nbatch: {micro_batch_size: 8}",
     r"sample_budget \(7\) is smaller than one effective batch \(8\); raise sample_budget or lower the batch$"),
    ("sample_budget: 31",
     r"sample_budget \(31\) is smaller than the baseline's batch, which is optimizer.reference_batch_size \(32\) .*; raise sample_budget, or give"),
    ("sample_budget: 63\nstages: [{type: frontier, smallest: 64}, {type: train}]",
     r"sample_budget \(63\) is smaller than the smallest batch .* = 64\); raise sample_budget or lower smallest$"),
    ("stages: [{type: frontier, smallest: 8, largest: 4}]", r"smallest \(8\) is larger than largest \(4\), .*; lower smallest or raise largest$"),
    ("stages: [{type: throughput}, {type: frontier}]",
     r"'throughput' before 'frontier', which chooses the micro-batch and the mode .*; put 'frontier' first$"),
    ("stages: [{type: train}, {type: frontier}]", r"'train' before 'frontier', .*; put 'frontier' first$"),
    ("stages: [{type: frontier}, {type: learning_rate}, {type: train}]",
     r"'learning_rate' before 'train', which chooses the batch .*; put 'train' first$"),
    ("stages: [{type: equivalence, micro_batch_sizes: [4, 3], effective_batch_size: 8}]", r"\(8\).*\(3 x 1 = 3\)"),
    ("stages: [{type: train}, {type: train}]", r"'train' twice; .*split it in two studies$"),
    ("stages: [{type: train, unscaled_contrast: true}]",
     r"stages.train.unscaled_contrast: no such key; the keys here are: type, pruner, max_runs$"),
    ("stages: [{type: train, max_runs: 0}]", r"stages.train.max_runs: it is 0, and takes more than 0; raise it$"),
    ("stages: [{type: branch}]", r"'branch' without 'train', which chooses the run that it trains again; add \{type: train\}$"),
    ("stages: [{type: train}, {type: branch}, {type: learning_rate}]",
     r"'branch' before 'learning_rate', which chooses the run that it trains again; put 'branch' after it$"),
    ("schedule: {type: cosine}\nstages: [{type: train}, {type: branch}]",
     r"needs a phase of constant learning rate, and schedule.type is cosine; set schedule: \{type: warmup_stable_decay\}, or"),
    ("schedule: {decay: 40%}\nstages: [{type: train}, {type: branch, at: [0.3, 0.7]}]",
     r"branch.at has 0.7, .*stable phase ends at 0.6 of a run \(schedule.decay is 0.4\); begin earlier, or lower the decay$"),
    ("stages: [{type: train}, {type: branch, samples: 0}]", r"stages.branch.samples: it is 0, and takes more than 0; raise it$"),
    ("objective: speed", r"objective: it is 'speed', and takes time, samples or target; write one of these$"),
    ("objective: target", r"objective: target has no target_loss; add target_loss, the validation loss to reach$"),
    ("target_loss: 2.5", r"target_loss \(2.5\) is only used by objective: target; .* or remove target_loss$"),
    ("objective: samples\ntarget_loss: 2.5", r"target_loss \(2.5\) is only used by objective: target; "),
    ("objective: target\ntarget_loss: .nan", r"target_loss: .*finite.*; write it in digits$"),
])  # fmt: skip
def test_a_bad_key_is_one_fault_that_says_where_what_and_the_remedy(tmp_path: Path, text: str, said: str) -> None:
    message = refusal(tmp_path, text)
    first, *faults = message.splitlines()
    assert first == f"{tmp_path}/study.yaml does not describe a study:"
    assert len(faults) == 1, message
    assert re.search(said, faults[0]), message


def test_the_run_directory_of_a_study_of_today_is_read_as_its_file_is(tmp_path: Path) -> None:
    written = load(tmp_path, "objective: target\ntarget_loss: 2.5\n")
    path = tmp_path / "stored.yaml"
    path.write_text(yaml.safe_dump(written.model_dump(mode="json"), sort_keys=False))
    assert load_stored_study(path) == written
    path.write_text(f"name: new\n{MINIMAL}stages: [{{type: train, unscaled_contrast: true}}]\n")
    with pytest.raises(ValueError, match="unscaled_contrast: no such key"):
        load_stored_study(path)


def test_several_faults_are_said_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, "world_size: 0\nfoo: 1\nseeds: []\n")
    assert len(message.splitlines()) == 4


def test_missing_sections_are_named(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("name: x\n")
    with pytest.raises(ValueError, match=r"model: is missing; add it\n  data: is missing; add it$"):
        load_study(path, [])


BILLION_SEEDS = "model: {target: gpt}\ndata:\n  target: text\n  kwargs:\n    a0: &a0 1\n" + "".join(
    f"    a{i + 1}: &a{i + 1} [{', '.join(10 * [f'*a{i}'])}]\n" for i in range(9)
)


def test_a_missing_file_and_one_that_is_no_study(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no study file .*nowhere.yaml; check the path"):
        load_study(tmp_path / "nowhere.yaml", [])
    path = tmp_path / "s.yaml"
    for text, said in (
        (
            "a: [1, 2",
            "is not valid YAML: while parsing a flow sequence of line 1 [^<]*, in line [12], column [0-9]+; fix that line",
        ),
        (
            "seeds: [1]\nname: n\nseeds: [2]",
            "is not valid YAML: the key 'seeds' is in line 1 already.*line 3.*; fix that",
        ),
        ("model: {target: a, kwargs: {b: 1,\n b: 2}}", "the key 'b' is in line 1 already.*line 2"),
        ("name: &x [*x]", "s.yaml is nested without end, or too deeply; write out what it refers to"),
        (
            BILLION_SEEDS,
            "s.yaml refers to its own parts so often that it holds 1,234,567,9.. values, .* at most 1,000,000; write",
        ),
        ("", "holds no keys; a study file needs at least model and data"),
        ("- 1", "holds no keys"),
        ("1: 2\nmodel: {target: gpt}\ndata: {target: x}", "1: .*; write '1'"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=re.compile(said, re.DOTALL)):
            load_study(path, [])
    path.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(ValueError, match=r"s.yaml is not UTF-8 text: line 1 has the byte 0xff; save it as UTF-8"):
        load_study(path, [])


@pytest.mark.parametrize(("override", "said"), [
    ("lr", r"--set 'lr' is not of the form key=value; write --set optimizer.lr=3e-4$"),
    ("=3", r"--set '=3' is not of the form key=value"),
    ("optimizer.lrr=3", r"optimizer.lrr: no such key; did you mean lr\? The keys here are: .*lr"),
    ("seeds=[1, 2", r"--set 'seeds=\[1, 2': what follows the = is not valid YAML; .*close its brackets$"),
    ("stages.7.smallest=4", r"the list has 1 member, numbered from 0, and '7' is none of them"),
    ("stages.fronteer.smallest=4", r"no stage fronteer here; did you mean frontier\?"),
    ("stages.grid.smallest=4", r"no stage grid here; add {type: grid} to stages"),
    ("name.first=4", r"lies inside a single value; set that value whole$"),
    ("name.first.second=4", r"lies inside a single value; set that value whole$"),
])  # fmt: skip
def test_faults_of_set_are_said(tmp_path: Path, override: str, said: str) -> None:
    assert re.search(said, refusal(tmp_path, "name: n\nstages: [{type: frontier}]\n", override))


@for_every(stage=get_args(StageKeys))
def test_an_unknown_key_of_any_stage_is_answered_with_the_stages_own(tmp_path: Path, stage: type[Strict]) -> None:
    message = refusal(tmp_path, f"stages: [{{type: {stage.model_fields['type'].default}, nonsense: 1}}]")
    assert message.endswith(f"nonsense: no such key; the keys here are: {', '.join(stage.model_fields)}")


# What is documented


def keys_with_documentation(module: str) -> Iterator[tuple[str, str]]:
    """(Class.key, the text under it) of every key that a module defines; the text is empty where there is none."""
    source = Path(importlib.import_module(module).__file__ or "").read_text()
    for owner in ast.parse(source).body:
        if isinstance(owner, ast.ClassDef):
            for field, below in zip(owner.body, [*owner.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield f"{owner.name}.{field.target.id}", documentation(below)


def documentation(node: ast.stmt | None) -> str:
    found = node.value if isinstance(node, ast.Expr) else None
    return " ".join(str(found.value).split()) if isinstance(found, ast.Constant) else ""


DOCUMENTED = dict(
    key
    for module in (
        "batchscout.orchestrator.config.keys",
        "batchscout.orchestrator.config.stages",
        "batchscout.trainers.config",
    )
    for key in keys_with_documentation(module)
    if not key[0].startswith(Split.__name__)
)


def keys_of(owner: type[Strict]) -> set[str]:
    """The keys of a class and of those that it inherits from, as the source names them."""
    own = {f"{base.__name__}.{name}" for base in owner.__mro__ for name in inspect.get_annotations(base)}
    return {key for key in own if not key.endswith(".model_config") and key in DOCUMENTED}


def test_every_key_of_a_study_file_is_among_those_whose_documentation_is_read() -> None:
    for owner in (StudyConfig, *get_args(StageKeys)):
        assert {key.split(".")[1] for key in keys_of(owner)} == owner.model_fields.keys()


@for_every(key=DOCUMENTED)
def test_every_key_has_documentation_in_whole_sentences(key: str) -> None:
    text = DOCUMENTED[key]
    assert len(text.split()) >= 3, "nothing under the field"
    assert text.endswith((".", "?")), text
    assert not re.search(r"^\W*(likewise|\.\.\.)", text, re.IGNORECASE), "each key is read alone"


@for_every(
    key=[f"{owner.__name__}.{name}" for owner in (StudyConfig, Batch, *get_args(StageKeys)) for name in nullable(owner)]
)
def test_what_null_does_is_said_where_null_is_allowed(key: str) -> None:
    assert "null: " in DOCUMENTED[key]


# What is derived


def test_a_stage_is_found_by_its_class() -> None:
    study = study_of(stages=[{"type": "frontier", "smallest": 3}])
    assert study.keys_of(Frontier) == Frontier(smallest=3)
    assert study.keys_of(Grid) is None


def test_a_split_multiplies_out_to_its_effective_batch() -> None:
    assert Split(micro_batch_size=3, gradient_accumulation_steps=5, world_size=7).effective_batch_size == 105
    assert Split(micro_batch_size=3, gradient_accumulation_steps=5, world_size=7).num_micro_batches == 35
    given = Batch(micro_batch_size=4, effective_batch_size=24)
    assert given_batch(given, world_size=2) == Split(micro_batch_size=4, gradient_accumulation_steps=3, world_size=2)


def test_the_batch_identity_holds_whatever_two_are_given() -> None:
    for batch, expected in (
        ({"micro_batch_size": 4}, (4, 1)),
        ({"micro_batch_size": 4, "gradient_accumulation_steps": 3}, (4, 3)),
        ({"micro_batch_size": 4, "effective_batch_size": 24}, (4, 3)),
        ({"micro_batch_size": 4, "gradient_accumulation_steps": 3, "effective_batch_size": 24}, (4, 3)),
    ):
        config = base_trial(study_of(batch=batch, world_size=2), None)
        assert (config.micro_batch_size, config.gradient_accumulation_steps) == expected
        assert config.effective_batch_size == expected[0] * expected[1] * 2


def test_the_learning_rate_scales_from_the_reference_batch() -> None:
    for rule, factor in (("none", 1.0), ("linear", 4.0), ("sqrt", 2.0), (0.75, 4.0**0.75), (1, 4.0)):
        optimizer = study_of(optimizer={"lr": 1e-3, "reference_batch_size": 8, "lr_scaling": rule}).optimizer
        assert scaled_learning_rate(optimizer, 32) == pytest.approx(1e-3 * factor)
        assert scaled_learning_rate(optimizer, 8) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("settings", "factor"),
    [({}, 2.0), ({"type": "sgd"}, 4.0), ({"type": "muon"}, 4.0**0.75), ({"target": "my.module:Lion"}, 2.0)],
    ids=["adamw", "sgd", "muon", "own"],
)
def test_the_rule_that_nobody_names_is_the_optimizers_own(settings: dict[str, Any], factor: float) -> None:
    optimizer = study_of(optimizer=settings | {"lr": 1e-3, "reference_batch_size": 8}).optimizer
    assert scaled_learning_rate(optimizer, 32) == pytest.approx(1e-3 * factor)


def test_betas_follow_the_batch_where_there_are_any_and_ones_own_decay_stays_its_own() -> None:
    for kind, changes in (("adamw_8bit", True), ("muon", True), ("sgd", False), ("adafactor", False)):
        found = optimizer_at(study_of(optimizer={"type": kind, "reference_batch_size": 8}).optimizer, 4, 0.1)
        assert (found.betas != (0.9, 0.95)) is changes
    own = study_of(optimizer={"target": "my.module:Lion", "kwargs": {"betas": [0, 1]}})
    found = optimizer_at(own.optimizer, 4, 0.1)
    assert (found.name, found.kwargs) == ("my.module:Lion", {"betas": [0, 1]})
    assert (found.betas, found.weight_decay) == ((0.9, 0.95), 0.1)


def test_warm_up_is_in_samples_and_lasts_30_steps_but_no_more_than_a_fifth_of_the_run() -> None:
    config = study_of()
    by_batch = [(1, 100), (3, 100), (8, 240), (32, 960), (64, 1920), (128, 2000), (5000, 2000)]
    assert [(batch, warmup_samples(config, batch, 10_000)) for batch, _ in by_batch] == by_batch
    assert warmup_samples(config, 8, 100_000) == 1000, "1 % of a long run is more than 30 steps"
    given = study_of(optimizer={"warmup": 40}, sample_budget=1000)
    budgets = [(1, 1000), (128, 1000), (8, 5000), (8, 500)]
    assert [warmup_samples(given, batch, budget) for batch, budget in budgets] == [40, 40, 40, 20]


@pytest.mark.parametrize(("schedule", "ends"), [("cosine", 1000), ("constant", 1000), ("warmup_stable_decay", 800)])
def test_a_warm_up_that_does_not_end_before_the_run_is_refused_with_both_numbers(schedule: str, ends: int) -> None:
    """With one of cosine's the rate was 0 throughout."""
    keys: dict[str, Any] = {"sample_budget": 1000, "schedule": {"type": schedule}}
    study_of(**keys, optimizer={"warmup": ends - 1})
    with pytest.raises(
        ValueError, match=rf"optimizer.warmup \({ends} samples\).*{ends}.*lower it or raise sample_budget"
    ):
        study_of(**keys, optimizer={"warmup": ends})


@pytest.mark.parametrize(
    ("optimizer", "idle"),
    [
        ({"target": "torch.optim:AdamW", "weight_decay": 0.3}, "weight_decay"),
        ({"target": "torch.optim:AdamW", "eps": 1e-5, "betas": [0.8, 0.9]}, "betas and eps"),
        ({"type": "adafactor", "betas": [0.8, 0.9]}, "betas"),
        ({"type": "sgd", "eps": 1e-5}, "eps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_number_that_the_optimizer_does_not_take_is_refused(optimizer: dict[str, Any], idle: str) -> None:
    with pytest.raises(ValueError, match=f"optimizer has {idle}, which have no effect on "):
        study_of(optimizer={"lr": 1e-3, **optimizer})
    finetuned = study_of(
        regime="finetune", initial_weights="own", optimizer={"lr": 1e-3, "target": "torch.optim:AdamW"}
    )
    assert "weight_decay" not in finetuned.optimizer.model_fields_set


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"schedule": {"type": "cosine", "decay": 0.1}}, r"decay \(0.1\).*type cosine; leave"),
        ({"schedule": {"type": "table", "factors": [1, 0.5], "decay": 0.3}}, r"decay \(0.3\).*type table; leave"),
        (
            {"optimizer": {"target": "torch.optim:NAdam", "weight_decay_scaling": "samples"}},
            "weight_decay_scaling: samples, which has no effect on torch.optim:NAdam.*leave it out",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_schedule_or_optimizer_do_not_heed_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        study_of(**keys)


@pytest.mark.parametrize(("batch", "beta2"), [(4, 0.95**0.5), (8, 0.95), (16, 0.95**2), (128, 0.9)])
def test_the_half_life_of_the_second_moment_is_held_in_samples(batch: int, beta2: float) -> None:
    optimizer = study_of(optimizer={"reference_batch_size": 8, "beta2_scaling": "samples"}).optimizer
    assert optimizer_at(optimizer, batch, 0.1).betas == (0.9, pytest.approx(beta2))
    at_one = study_of(
        optimizer={"reference_batch_size": 4096, "beta2_scaling": "samples"}, sample_budget=4096
    ).optimizer
    assert optimizer_at(at_one, 1, 0.1).betas == (0.9, 0.9999)
    for betas in ((0.9, 0.99995), (0.95, 0.9)):
        own = study_of(optimizer={"reference_batch_size": 8, "betas": list(betas)}).optimizer
        assert optimizer_at(own, 8, 0.1).betas == betas, "at the batch that they were given for"


@pytest.mark.parametrize(
    ("batch", "rate", "decay"), [(8, 0.004, 0.3), (32, 0.008, 0.6), (8, 0.001, 1.2), (128, 0.001, 3.0), (1, 0.1, 0.003)]
)
def test_the_timescale_of_weight_decay_is_held_in_samples(batch: int, rate: float, decay: float) -> None:
    keys = {"lr": 0.004, "reference_batch_size": 8, "weight_decay": 0.3, "weight_decay_scaling": "samples"}
    found = optimizer_at(study_of(optimizer=keys).optimizer, batch, rate)
    assert found.weight_decay == pytest.approx(decay)


def test_what_does_not_follow_the_batch_stays() -> None:
    optimizer = study_of(optimizer={"betas": [0.8, 0.99], "weight_decay": 0.3, "beta2_scaling": "none"}).optimizer
    assert optimizer_at(optimizer, 512, 0.1) == OptimizerConfig(betas=(0.8, 0.99), weight_decay=0.3)


@pytest.mark.parametrize("budget", [512, 10_000, 1_000_003])
def test_the_first_rung_of_every_run_lies_past_its_warm_up(budget: int) -> None:
    config, pruner = study_of(), AshaPruner()
    for batch in (1, 4, 32, 256, 4096):
        for own in (budget, 3 * budget, budget // 3):
            first, *others = pruner.rungs(budget, own)
            assert warmup_samples(config, batch, own) < first < own
            assert all(first < other < own for other in others)


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 0.25),
        ({"optimizer": {"warmup": 256}}, 0.5),
        ({"optimizer": {"warmup": 0}, "schedule": {"type": "table", "factors": [0.1, 0.4, 0.7, 1.0, 0.6, 0.3]}}, 0.6),
        ({"optimizer": {"warmup": 0}, "schedule": {"type": "table", "factors": [1.0, 0.5, 1.0, 0.5]}}, 0.25),
    ],
    ids=["of the study's own warm-up", "of one in samples", "of a cycle", "without"],
)
def test_no_run_is_compared_before_its_rate_has_risen(changes: dict[str, Any], share: float) -> None:
    config = study_of(sample_budget=512, **changes)
    assert AshaPruner().rungs(512, 1024, rises_until(config))[0] == 2 * math.ceil(share * 512)
    assert AshaPruner(min_samples=64).rungs(512, 512, rises_until(config))[0] == 64, "as the study file says"


@pytest.mark.parametrize(("total", "count"), [(512, 8), (10, 3), (3, 8), (1, 1)])
def test_evaluations_are_evenly_spaced_and_the_budget_is_the_last(total: int, count: int) -> None:
    points = evenly_spaced(total, count)
    assert points[-1] == total
    assert len(points) == min(total, count)
    gaps = [b - a for a, b in zip((0, *points), points, strict=False)]
    assert max(gaps) - min(gaps) <= 1


def test_the_precisions_of_a_study_are_all_that_a_trial_may_have_and_float32() -> None:
    assert precisions(study_of()) == {"float32"}
    tries = {"type": "frontier", "precision": ["float32", "float16"]}
    assert precisions(study_of(precision="bfloat16", stages=[tries])) == {"float32", "bfloat16", "float16"}


def test_a_study_without_compile_has_no_trial_that_compiles() -> None:
    eager = {"type": "frontier", "compile": [False]}
    assert base_trial(study_of(stages=[eager]), None).compile is False
    assert base_trial(study_of(stages=[{"type": "train"}]), None).compile is True
    assert not uses_compile(study_of(stages=[{"type": "grid"}], compile=False))
    assert not uses_compile(study_of(stages=[eager, {"type": "grid"}]))
    assert uses_compile(study_of(stages=[{"type": "grid", "compile": ["whole"]}], compile=False))


@pytest.mark.parametrize(
    ("listed", "compiled"), [(["blocks", "whole"], True), (["whole", False], "whole"), ([False, "whole"], "whole")]
)
def test_blocks_is_another_word_for_true_and_the_first_that_compiles_is_every_trials(
    listed: list[str | bool], compiled: str | bool
) -> None:
    study = study_of(stages=[{"type": "frontier", "compile": listed}])
    assert base_trial(study, None).compile == compiled
    assert study.model_dump()["stages"][0]["compile"] == tuple(one if one != "blocks" else True for one in listed)


@pytest.mark.parametrize(
    "where", [{"compile": "whole"}, {"stages": [{"type": "frontier", "compile": [True, "whole"]}]}]
)
def test_one_graph_of_a_model_that_is_gathered_block_by_block_is_refused(where: dict[str, Any]) -> None:
    said = (
        "compile: whole makes one graph of the model, and parallel: fsdp gathers it block by block; use compile: blocks"
    )
    with pytest.raises(ValueError, match=said):
        study_of(parallel="fsdp", world_size=2, **where)


def test_a_type_that_is_all_that_is_said_may_stand_alone(tmp_path: Path) -> None:
    """Also where `--set` changes a stage that is named so."""
    short = load(tmp_path, "stages: [frontier, train]\nschedule: cosine\noptimizer: sgd\n", "stages.train.max_runs=5")
    whole = load(
        tmp_path,
        "stages: [{type: frontier}, {type: train, max_runs: 5}]\nschedule: {type: cosine}\noptimizer: {type: sgd}\n",
    )
    assert short == whole


@pytest.mark.parametrize("text", ["seeds: 3\n", "objective: target\n", "from: {lightning: a:b, script: c}\n", "a: [\n"])
def test_a_fault_is_raised_alone(tmp_path: Path, text: str) -> None:
    """In a notebook all that an exception was raised from is printed above it."""
    with pytest.raises(ValueError, match=r"\w") as raised:
        load(tmp_path, text)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
