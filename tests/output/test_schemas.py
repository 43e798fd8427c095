"""The JSON Schemas: what they say is what the program takes and writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from batchscout.orchestrator.config.load import parse_study
from batchscout.orchestrator.output.schemas import SCHEMA_NAMES, SchemaName, editors_line, schema_path
from batchscout.orchestrator.output.schemas.generate import generated, text_of
from batchscout.orchestrator.output.status import json_pieces
from tests.support.command_line import Typed
from tests.support.every import for_every
from tests.support.outcome import GOLDEN, kept_in

ROOT = Path(__file__).parents[2]
STUDY_FILES = sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("examples/*/*.yaml")])
LEAST: dict[str, Any] = {"model": {"target": "gpt"}, "data": {"target": "python_stdlib"}}


def faults(name: SchemaName, instance: Any) -> list[str]:
    """What a validator says of an instance, with the places."""
    schema = json.loads(schema_path(name).read_text())
    Draft202012Validator.check_schema(schema)
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(instance)]


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_the_files_are_what_the_types_make(name: SchemaName) -> None:
    renew = "write them anew: python -m batchscout.orchestrator.output.schemas.generate (raise VERSIONS there where a key is gone or means something else)"
    assert schema_path(name).read_text() == text_of(generated(name)), renew


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_a_schema_is_printed_as_it_is_and_names_its_version(name: SchemaName, typed: Typed) -> None:
    code, printed, _ = typed("schema", name)
    assert code == 0
    assert printed == schema_path(name).read_text()
    assert re.fullmatch(rf"urn:batchscout:schema:{name}:[1-9]\d*", json.loads(printed)["$id"])


@for_every(file=STUDY_FILES)
def test_every_study_file_validates_and_names_a_schema_that_is_there(file: Path) -> None:
    text = file.read_text()
    assert faults("study", yaml.safe_load(text)) == []
    first = text.splitlines()[0]
    _, _, path = first.partition("$schema=")
    assert first == editors_line(path)
    assert (file.parent / path).resolve() == schema_path("study").resolve()


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"optimiser": {"lr": 1}}, "optimiser"),
        ({"optimizer": {"learning_rate": 1}}, "learning_rate"),
        ({"stages": [{"type": "frontier", "smalest": 4}]}, "stages[0]"),
        ({"stages": [{"smallest": 4}]}, "stages[0]"),
        ({"stages": []}, "stages"),
        ({"precision": "float8"}, "precision"),
        ({"headroom": 1.5}, "headroom"),
        ({"loss": "crossentropy"}, "loss"),
        ({"world_size": True}, "world_size"),
        ({"batch": {"micro_batch_size": 0}}, "micro_batch_size"),
        ({"data": None}, "data"),
        ({"from": {"lightning": "train:make"}}, "$"),
    ],
)
def test_what_the_program_refuses_is_refused_with_its_place(changes: dict[str, Any], place: str) -> None:
    found = faults("study", LEAST | changes)
    assert any(place in fault for fault in found), found
    if "from" not in changes:
        with pytest.raises(ValueError, match="does not describe a study"):
            parse_study(LEAST | {"name": "a"} | changes, "it")


@pytest.mark.parametrize(
    "changes",
    [
        {"headroom": "5%", "memory_limit": "1.5GiB", "compile": "blocks"},
        {"tracking": {"wandb": False}},  # a bare `off`, as YAML 1.1 reads it
        {"loss": "my.module:loss", "micro_batch": {"tokens": "auto"}},
        {"loss": {"type": "cross_entropy", "ignore_index": 255}, "data": {"target": "a:b", "pad": {"x": 0}}},
        {
            "stages": [
                {"type": "frontier", "activation_checkpointing": [0.5]},
                {"type": "train", "pruner": {"type": "none"}},
            ]
        },
    ],
)
def test_what_the_program_takes_validates(changes: dict[str, Any]) -> None:
    parse_study(LEAST | {"name": "a"} | changes, "it")
    assert faults("study", LEAST | changes) == []


def test_an_object_that_trains_elsewhere_needs_neither_model_nor_data() -> None:
    source = {"from": {"lightning": "train:make"}}
    assert faults("study", source) == []
    assert faults("study", source | {"model": {"blocks": "layers"}}) == []
    assert faults("study", {"memory_limit": "1GiB"}) != []


def test_every_key_of_a_study_file_is_described() -> None:
    schema = json.loads(schema_path("study").read_text())
    objects = [schema, *schema["$defs"].values()]
    without = [key for tree in objects for key, value in tree["properties"].items() if "description" not in value]
    assert without == ["from"], "which has its own, where it refers to"


@pytest.mark.parametrize("run_dir", sorted(GOLDEN.iterdir()), ids=lambda path: path.name)
def test_what_studies_have_written_validates(run_dir: Path) -> None:
    status = json.loads("".join(json_pieces(*kept_in(run_dir), is_driven=False)))
    assert faults("status", status) == []
    assert faults("status", status | {"stages": [{"type": "train", "state": "paused"}]}) != []
    if (file := run_dir / "recommendation.json").exists():
        recommendation = json.loads(file.read_text())
        assert faults("recommendation", recommendation) == []
        assert faults("recommendation", recommendation | {"micro_batch_size": "four"}) != []
