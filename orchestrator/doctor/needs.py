"""What a study file asks of a machine, as far as reading it tells: none of its code is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from batchscout.orchestrator.config.load import read_yaml, spell_out
from batchscout.orchestrator.doctor.facts import Needs
from batchscout.orchestrator.output.tracking import EXTRAS
from batchscout.trainers.data.corpus import FILE_FORMATS
from batchscout.trainers.files import quoted
from batchscout.trainers.knobs import KNOBS
from batchscout.trainers.knobs.optimizer_8bit import NAME


def tree_of(study: Path) -> dict[str, Any]:
    if not study.is_file():
        raise ValueError(f"there is no study file {quoted(study)}; check the path, or leave it out")
    tree = read_yaml(study)
    if not isinstance(tree, dict):
        raise ValueError(f"{quoted(study)} holds no keys; batchscout init writes a study file")
    spell_out(tree)
    return tree


def needs_of(tree: Mapping[str, Any]) -> Needs:
    """Return what a study file asks of the machine."""
    model, data, source, tracking = (_section(tree, key) for key in ("model", "data", "from", "tracking"))
    uses_hf = model.get("target") == "hf" or "transformers" in (tree.get("loss"), _section(tree, "loss").get("type"))
    libraries = {
        "transformers": uses_hf or "transformers" in source,
        "accelerate": "transformers" in source,  # no Trainer can be made without
        "lightning": "lightning" in source,
        "peft": bool(model.get("peft")),
        "torchao": _optimizer_type(tree) in ("adamw_8bit", "adamw_4bit") or NAME in _memory_knobs(tree),
        **{package: bool(tracking.get(key)) for key, packages in EXTRAS.items() for package in packages},
    }
    named = [
        _section(model, "kwargs").get("name") if model.get("target") == "hf" else None,
        _section(data, "kwargs").get("path") if data.get("target") == "hf" else None,
    ]
    wandb, knobs, placement = tracking.get("wandb"), _memory_knobs(tree), _section(tree, "placement")
    return Needs(
        compiles=_compiles(tree),
        libraries=tuple(name for name, is_needed in libraries.items() if is_needed),
        hub_names=tuple(str(name) for name in named if name and not (name in FILE_FORMATS or Path(str(name)).exists())),
        memory_knobs=tuple(one.name for one in KNOBS if one.name in knobs and one.name != NAME),
        memory_limit_bytes=_bytes(tree.get("memory_limit")),
        world_size=_number(tree.get("world_size")),
        lanes=_number(placement.get("lanes")),
        cpus_per_rank=_number(placement.get("cpus_per_rank")),
        wandb=wandb if isinstance(wandb, str) else "off",
    )


def _number(given: Any) -> int:
    return given if isinstance(given, int) else 1


def _bytes(given: Any) -> int | None:
    try:
        return TypeAdapter(ByteSize).validate_python(given)
    except ValidationError:  # as `plan` will say
        return None


def _optimizer_type(tree: Mapping[str, Any]) -> Any:
    optimizer = tree.get("optimizer")  # its type alone is taken for it, too
    return _section(tree, "optimizer").get("type") if isinstance(optimizer, dict) else optimizer


def _memory_knobs(tree: Mapping[str, Any]) -> list[Any]:
    """Return those that the study has for every trial, and those that its stages try."""
    found = [one.get("memory_knobs") for one in (tree, *_stages(tree))]
    return [name for names in found if isinstance(names, list) for name in names]


def _stages(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the stages of which more than the type is said."""
    stages = tree.get("stages")
    return [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []


def _section(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = tree.get(key)
    return found if isinstance(found, dict) else {}


def _compiles(tree: Mapping[str, Any]) -> bool:
    """False where the frontier and a grid that says it, or the study without either, compile nothing."""
    told = _stages(tree)
    said = [(stage.get("type"), stage.get("compile")) for stage in told]
    lists = [compiled for kind, compiled in said if kind == "frontier" or (kind == "grid" and compiled)]
    if not told or lists:
        return not told or any(one != [False] for one in lists)
    return tree.get("compile") is not False
