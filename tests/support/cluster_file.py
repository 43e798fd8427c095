"""cluster.yaml, as it stands and as the comment at its end says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

CLONE = Path(__file__).parents[2]
LOCAL_VARIANT = "# --- Machines that you already have"


def cluster_yaml() -> dict[str, Any]:
    return yaml.safe_load((CLONE / "cluster.yaml").read_text())


def local_variant() -> dict[str, Any]:
    """cluster.yaml changed as the comment at its end says."""
    text = (CLONE / "cluster.yaml").read_text().partition(LOCAL_VARIANT)[2]
    lines = [line.removeprefix("# ") for line in text.splitlines()[1:]]
    start = next(number for number, line in enumerate(lines) if line == "provider:")
    replaced = ("provider", "auth", "max_workers", "head_node_type", "available_node_types")
    kept = {key: value for key, value in cluster_yaml().items() if key not in replaced}
    return kept | yaml.safe_load("\n".join(lines[start:]))
