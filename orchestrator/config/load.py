"""From a YAML file and `--set` to a checked StudyConfig; what is wrong with them is said in the user's words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from orchestrator.config.keys import StudyConfig
from orchestrator.config.stages import (
    AshaPruner,
    Equivalence,
    Frontier,
    Grid,
    LearningRate,
    NoPruner,
    Throughput,
    Train,
)
from trainers.config import (
    Strict,
)


def read_yaml(path: Path) -> Any:
    """What a YAML file says. Raises ValueError, with the line, where it is not YAML."""
    try:
        return yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}; mend that line") from error


def load_study(path: Path, overrides: list[str]) -> StudyConfig:
    """The study that a file describes, with `a.b=c` overrides; relative data paths are resolved here and now.

    Raises ValueError in the user's words: what is wrong, where, and what would be right.
    """
    if not path.is_file():
        raise ValueError(f"there is no study file {path}; check the path, or start from one in configs/")
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds no keys; a study file needs at least model and data")
    tree.setdefault("name", path.stem)
    if any(override.startswith("stages.") for override in overrides):
        tree.setdefault("stages", [{"type": stage.type} for stage in StudyConfig.model_fields["stages"].default])
    for override in overrides:
        apply_override(tree, override)
    _make_absolute(tree)
    return parse_study(tree, str(path))


def _make_absolute(tree: dict[str, Any]) -> None:
    """Paths that exist from here on: a worker has another directory, and so has the next command."""
    for part, keys in (("data", ("train", "val", "path", "tokenizer")), ("model", ("name",))):
        section = tree.get(part)
        if (
            not isinstance(section, dict)
            or not isinstance(section.get("kwargs"), dict)
            or ":" in str(section.get("target"))
        ):
            continue
        kwargs = section["kwargs"]
        for key in keys:
            if key in kwargs:
                kwargs[key] = _absolute(kwargs[key], always=section["target"] == "text" and key in ("train", "val"))


def _absolute(value: Any, *, always: bool) -> Any:
    """A path, or each of a list; what might be a name in a registry instead only where such a file exists."""
    if isinstance(value, list):
        return [_absolute(item, always=always) for item in value]
    if isinstance(value, str) and (always or Path(value).exists()):
        return str(Path(value).expanduser().absolute())
    return value


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `a.b=c`; c is read as YAML, list members are addressed by their number (stages.0.smallest=4)."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"--set '{override}' is not of the form key=value; write --set optimizer.lr=3e-4")
    *parents, last = key.split(".")
    node: Any = tree
    for name in parents:
        node = _child(node, name, override)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(
            f"--set '{override}': what follows the = is not valid YAML; quote it, or close its brackets"
        ) from error
    if isinstance(node, list):
        node[_list_index(node, last, override)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ValueError(f"--set '{override}': '{key}' lies inside a single value; set that value whole")


def _child(node: Any, name: str, override: str) -> Any:
    if isinstance(node, list):
        return node[_list_index(node, name, override)]
    if not isinstance(node, dict):
        raise ValueError(f"--set '{override}': '{name}' lies inside a single value; set that value whole")
    if node.get(name) is None:
        node[name] = {}
    return node[name]


def _list_index(items: list[Any], name: str, override: str) -> int:
    """A list member by number, or a stage by its type."""
    by_type = [i for i, item in enumerate(items) if isinstance(item, dict) and item.get("type") == name]
    if by_type:
        return by_type[0]
    if not name.isdigit() or int(name) >= len(items):
        raise ValueError(
            f"--set '{override}': the list has {len(items)} members, numbered from 0; '{name}' is none of them"
        )
    return int(name)


def parse_study(tree: dict[str, Any], source: str) -> StudyConfig:
    """A checked StudyConfig. Raises ValueError with one line per fault."""
    try:
        return StudyConfig.model_validate(_numbers(tree))
    except ValidationError as error:
        faults = "\n".join(f"  {_fault(item)}" for item in _own_faults(error.errors()))
        raise ValueError(f"{source} does not describe a study:\n{faults}") from error


def _numbers(value: Any) -> Any:
    """YAML 1.1 reads `6e-4` as text for want of a dot; whoever writes it means the number."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, str) and value[:1] in "-+0123456789." and "e" in value.lower():
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _own_faults(items: Sequence[Any]) -> list[Any]:
    """Without lists that are called too short only because a member of theirs is at fault."""

    def a_member_is_at_fault(place: tuple[Any, ...]) -> bool:
        return any(item["loc"] != place and item["loc"][: len(place)] == place for item in items)

    return [item for item in items if item["type"] != "too_short" or not a_member_is_at_fault(item["loc"])]


def _fault(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"]) or "the file"
    if item["type"] == "extra_forbidden":
        known = ", ".join(_known_keys(item["loc"]))
        return f"{where}: no such key; the keys here are: {known}" if known else f"{where}: no such key; remove it"
    if item["type"] == "missing":
        return f"{where}: is missing; add it"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{where}: {message}" if item["loc"] else message
    return f"{where}: {message} (it is {item['input']!r}); change it"


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    """The keys that are possible where an unknown one was found."""
    owner: Any = StudyConfig
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        field = owner.model_fields.get(part) if owner else None
        owner = _model_class(field.annotation) if field else _STAGES.get(str(part), owner)
    return list(owner.model_fields) if owner else []


def _model_class(annotation: Any) -> Any:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Strict) else None


_STAGES: dict[str, Any] = {
    "frontier": Frontier,
    "throughput": Throughput,
    "equivalence": Equivalence,
    "train": Train,
    "learning_rate": LearningRate,
    "grid": Grid,
    "asha": AshaPruner,
    "none": NoPruner,
}
