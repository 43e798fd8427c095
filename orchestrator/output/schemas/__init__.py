"""JSON Schemas of what is read and written: `batchscout schema` prints them, and editors complete a study file by the first one.

The files beside this one are made from the types: `python -m batchscout.orchestrator.output.schemas.generate` writes them anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

SchemaName = Literal["study", "status", "recommendation"]
SCHEMA_NAMES: tuple[SchemaName, ...] = get_args(SchemaName)


def schema_path(name: SchemaName) -> Path:
    """Return where the schema lies, in this installation."""
    return Path(__file__).with_name(f"{name}.schema.json")


def editors_line(path: str) -> str:
    """Return the first line of a study file by which an editor finds the schema at this path."""
    return f"# yaml-language-server: $schema={path}"
