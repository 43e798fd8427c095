"""Verbs that help whoever writes a study file, or sets a machine up."""

from __future__ import annotations

import argparse
import sys

from trainers.files import own_file

SCHEMAS = ("study", "status", "recommendation")


def schema(arguments: argparse.Namespace) -> int:
    """Print the JSON Schema of a study file, of `status --json` or of recommendation.json."""
    from orchestrator.output.schemas import schema_path

    path = schema_path(arguments.of)
    with own_file(path, "read"):
        sys.stdout.write(path.read_text())
    return 0
