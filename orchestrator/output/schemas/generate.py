"""Makes the JSON Schemas from the types, with the documentation of their fields: `python -m batchscout.orchestrator.output.schemas.generate`."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.sources import NAMED_BY_IT, From
from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.orchestrator.output.schemas import SCHEMA_NAMES, SchemaName, schema_path
from batchscout.orchestrator.output.schemas.field_texts import texts_under_fields
from batchscout.orchestrator.output.status import StudyStatus

DIALECT = "https://json-schema.org/draft/2020-12/schema"
VERSIONS: dict[SchemaName, int] = {"study": 1, "status": 1, "recommendation": 1}
"""Rises where a key is gone or means something else; a new key alone changes none."""
_TITLES: dict[SchemaName, str] = {
    "study": "A study file of batchscout",
    "status": "What batchscout status --json prints",
    "recommendation": "recommendation.json of a run directory",
}
# pydantic's names for the bounds of a number that a function of ours reads, and JSON Schema's.
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def generated(name: SchemaName) -> dict[str, Any]:
    """Return the schema that the types make now."""
    head = {"$schema": DIALECT, "$id": f"urn:batchscout:schema:{name}:{VERSIONS[name]}", "title": _TITLES[name]}
    body = _study_file() if name == "study" else _schema_of(StudyStatus if name == "status" else Recommendation)
    return head | {key: value for key, value in body.items() if key != "title"}


def text_of(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=1) + "\n"


def _study_file() -> dict[str, Any]:
    """Return the schema of StudyConfig as a file has it: the name may be left out, and `from` stands for some of the keys."""
    tree, source = _schema_of(StudyConfig), _schema_of(From)
    tree["$defs"] |= {"From": {key: value for key, value in source.items() if key != "$defs"}}
    tree["properties"] = {"from": {"$ref": "#/$defs/From"}} | tree["properties"]
    # As `config.load` takes them: a word for a `type` that is all that is said.
    tree["properties"]["stages"]["items"] = _or_a_type(tree["properties"]["stages"]["items"], tree)
    for key in ("schedule", "optimizer"):
        tree["properties"][key] = _or_a_type(tree["properties"][key], tree)
    tree["required"] = []
    del tree["$defs"]["ModelConfig"]["required"]
    tree["if"] = {"required": ["from"]}
    tree["then"] = {
        "properties": {"model": {"propertyNames": {"const": "blocks"}}, **dict.fromkeys(NAMED_BY_IT, False)}
    }
    tree["else"] = {"required": ["model", "data"], "properties": {"model": {"required": ["target"]}}}
    return tree


def _or_a_type(section: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a section, or of one of several by their type, that takes the type alone, too."""
    members = [tree["$defs"][member["$ref"].rpartition("/")[2]] for member in section.get("oneOf", [section])]
    types = [member["properties"]["type"] for member in members]
    words = [word for one in types for word in one.get("enum", [one.get("const")])]
    about = {key: value for key, value in section.items() if key in ("default", "description")}
    return {"anyOf": [{key: value for key, value in section.items() if key not in about}, {"enum": words}], **about}


def _schema_of(kind: Any) -> dict[str, Any]:
    return TypeAdapter(kind).json_schema(schema_generator=_Documented)


class _Documented(GenerateJsonSchema):
    """Takes the text under each field for its description."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        return _documented(super().model_schema(schema), schema["cls"])

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        return _documented(super().dataclass_schema(schema), schema["cls"])

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        """Have each member say its `type`: pydantic takes none without."""
        union = super().tagged_union_schema(schema)
        return {"required": ["type"], **union}

    def field_title_should_be_set(self, schema: Any) -> bool:
        """No: it would be the key once more."""
        return False

    def generate(self, schema: Any, mode: Any = "validation") -> JsonSchemaValue:
        return _with_bounds(super().generate(schema, mode))


def _documented(tree: JsonSchemaValue, owner: type) -> JsonSchemaValue:
    """Return the schema of a class with its docstring and the text under each field, each in one line."""
    texts = texts_under_fields(owner)
    properties = {
        key: {**value, "description": _one_line(texts[key])} if key in texts else value
        for key, value in tree.get("properties", {}).items()
    }
    described = {"description": _one_line(owner.__doc__)} if owner.__doc__ else {}
    return {**tree, **described, "properties": properties}


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _with_bounds(tree: Any) -> Any:
    """Return the tree with pydantic's names of bounds replaced by the schema's."""
    if isinstance(tree, list):
        return [_with_bounds(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        _BOUNDS.get(key, key) if not isinstance(value, dict) else key: _with_bounds(value)
        for key, value in tree.items()
    }


if __name__ == "__main__":
    for each in SCHEMA_NAMES:
        schema_path(each).write_text(text_of(generated(each)))
