"""Turns a study file and `--set` into a checked StudyConfig."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from pydantic import ValidationError

from batchscout.orchestrator.config.faults import STAGES, fault_lines
from batchscout.orchestrator.config.keys import StudyConfig, check_typed
from batchscout.orchestrator.config.placeholders import PLACEHOLDER, placeholders
from batchscout.orchestrator.config.regimes import OWN_WEIGHTS
from batchscout.orchestrator.config.sources import with_source
from batchscout.orchestrator.config.trial import check_knobs_of
from batchscout.orchestrator.near_words import instead
from batchscout.orchestrator.units import counted
from batchscout.trainers.data.corpus import FILE_FORMATS
from batchscout.trainers.files import own_file, quoted

Yaml: TypeAlias = "bool | int | float | str | list[Yaml] | dict[str, Yaml] | None"
"""What a YAML file may hold, as far as a study file has a use for it."""

MOST_VALUES = 1_000_000
"""Nine lines of references to references hold a billion values, which no memory does."""
FEWEST_BYTES = 10**6
"""A smaller number without a unit was meant in GiB, or as a share: no model trains in so few bytes."""
_MERGE = "tag:yaml.org,2002:merge"
# Written in C, it reads a list of 10,000 numbers in 0.1 s where the other takes one second.
_AnyLoader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


_FLOAT = "tag:yaml.org,2002:float"
_WITH_AN_EXPONENT = (_FLOAT, re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))
"""Numbers such as 6e-4 and 1.5e4, which YAML 1.1 takes for text."""


class _Loader(_AnyLoader):
    """Takes 6e-4 for a number where it is not quoted, and refuses a key that stands twice, of which YAML's own loader takes the last without a
    word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if key.value in lines:
                    said = f"the key '{key.value}' is in line {lines[key.value]} already"
                    raise yaml.constructor.ConstructorError(None, None, said, key.start_mark)
                lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that the loader would take for a number."""


_Loader.add_implicit_resolver(*_WITH_AN_EXPONENT)
_Dumper.add_implicit_resolver(*_WITH_AN_EXPONENT)


def written_yaml(tree: object) -> str:
    """Return the text that `read_yaml` reads as this tree."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)


def read_yaml(path: Path) -> Yaml:
    """Return what a YAML file holds. Raises ValueError, with the line, where it is not YAML."""
    try:
        with own_file(path, "read"):
            return yaml.load(path.read_text("utf-8"), _Loader)
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{quoted(path)} is not UTF-8 text: line {line} has the byte 0x{error.object[error.start]:02x}; save it as UTF-8"
        ) from None
    except yaml.YAMLError as error:
        raise ValueError(f"{quoted(path)} is not valid YAML: {_fault_text(error)}; fix that line") from None


def _fault_text(error: yaml.YAMLError) -> str:
    """Return what is wrong, in which line, and where that began, without the name that the library has for a text that is no file."""
    if not isinstance(error, yaml.MarkedYAMLError) or (mark := error.problem_mark or error.context_mark) is None:
        return str(error)
    began = (
        error.context and f"{error.context}{f' of line {error.context_mark.line + 1}' if error.context_mark else ''}"
    )
    return f"{' '.join(filter(None, [began, error.problem]))}, in line {mark.line + 1}, column {mark.column + 1}"


def load_study(
    path: Path,
    overrides: list[str],
    say: Callable[[str], object] = lambda _: None,
    given: Callable[[Path], Yaml] = read_yaml,
) -> StudyConfig:
    """Return the study that a file describes, changed by overrides of the form `a.b=c`.

    Relative paths of the data become absolute here, and what an object under `from` says is read. say: tells people where the
    study differs from that object. given: returns the file's keys. Raises ValueError that says what is wrong, where, and what would be right.
    """
    if (stored := path / "study.yaml").is_file():
        raise ValueError(
            f"{quoted(path)} is a run directory, and a study file is taken; write {quoted(stored)} --dir {quoted(path)} in its place"
        )
    if not path.is_file():
        raise ValueError(f"there is no study file {quoted(path)}; check the path, or let batchscout init write one")
    tree = given(path)
    if not isinstance(tree, dict):
        raise ValueError(f"{quoted(path)} holds no keys; a study file needs at least model and data")
    tree.setdefault("name", path.stem)
    spell_out(tree)
    if any(override.startswith("stages.") for override in overrides):
        tree.setdefault("stages", [{"type": stage.type} for stage in StudyConfig.model_fields["stages"].default])
    for override in overrides:
        apply_override(tree, override)
    _check_size(tree, quoted(path))
    if open_places := list(placeholders(tree)):
        raise ValueError(
            f"{quoted(path)} still says {PLACEHOLDER} at {', '.join(open_places)}; fill them in, as the comment at its top says"
        )
    _make_absolute(tree)
    return study_of(tree, quoted(path), say)


def study_of(tree: dict[str, Any], source: str, say: Callable[[str], object]) -> StudyConfig:
    """Return the study that these keys describe, with what an object under `from` says. source: where the keys come from, in
    words. Raises ValueError that says all: what a library raised would be printed above it, in a notebook."""
    spell_out(tree)
    try:
        return parse_study(with_source(tree, say), source)
    except ValidationError as error:
        faults = "\n".join(f"  {line}" for line in fault_lines(error.errors(), ("from",)))
        raise ValueError(f"{source} does not describe a study:\n{faults}") from None


def spell_out(tree: dict[str, Any]) -> None:
    """Turn what stands as a word where a `type` is all that is said into that: `stages: [frontier, train]`, `schedule: cosine`."""
    stages = tree.get("stages")
    if isinstance(stages, list | tuple):
        tree["stages"] = [{"type": stage} if isinstance(stage, str) else stage for stage in stages]
    for key in ("schedule", "optimizer"):
        if isinstance(tree.get(key), str):
            tree[key] = {"type": tree[key]}


def _make_absolute(tree: dict[str, Yaml]) -> None:
    """Make the paths in the file absolute: a worker has another working directory, and so may the next command."""
    if tree.get("initial_weights") not in (None, OWN_WEIGHTS):
        tree["initial_weights"] = _absolute(tree["initial_weights"], always=True)
    for part, keys in (("data", ("train", "val", "path", "tokenizer")), ("model", ("name",))):
        section = tree.get(part)
        if not isinstance(section, dict) or ":" in str(section.get("target")):
            continue  # the arguments of a user's own callable are not ours to change
        kwargs = section.get("kwargs")
        if not isinstance(kwargs, dict):
            continue
        from_files = section.get("target") == "hf" and kwargs.get("path") in FILE_FORMATS
        if from_files and "data_files" in kwargs:  # of any other path they are relative to it, as load_dataset has them
            kwargs["data_files"] = _absolute(kwargs["data_files"], always=True)
        for key in keys:
            if key in kwargs and not (from_files and key == "path"):
                kwargs[key] = _absolute(
                    kwargs[key], always=section["target"] in ("text", "chat") and key in ("train", "val")
                )


def _absolute(value: Yaml, *, always: bool) -> Yaml:
    """Return a path, or each path of a list or mapping, made absolute. An address stays as it is and, unless `always`, so does a path
    that does not exist: it may be a name on a hub."""
    if isinstance(value, list):
        return [_absolute(item, always=always) for item in value]
    if isinstance(value, dict):
        return {key: _absolute(item, always=always) for key, item in value.items()}
    if isinstance(value, str) and "://" not in value and (always or Path(value).expanduser().exists()):
        return str(Path(value).expanduser().absolute())
    return value


def apply_override(tree: dict[str, Yaml], override: str) -> None:
    """Set one `a.b=c` in the tree. c is read as YAML. A list member is named by its number, a stage also by its
    type."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"--set '{override}' is not of the form key=value; write --set optimizer.lr=3e-4")
    *parents, last = key.split(".")
    node: Yaml = tree
    for name in parents:
        node = _child(node, name, override)
    try:
        value: Yaml = yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise ValueError(
            f"--set '{override}': what follows the = is not valid YAML; quote it, or close its brackets"
        ) from None
    if isinstance(node, list):
        node[_list_index(node, last, override)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ValueError(f"--set '{override}': '{key}' lies inside a single value; set that value whole")


def _child(node: Yaml, name: str, override: str) -> Yaml:
    """Return what stands below a node under this name, after making it an empty mapping if there is nothing."""
    if isinstance(node, list):
        return node[_list_index(node, name, override)]
    if not isinstance(node, dict):
        raise ValueError(f"--set '{override}': '{name}' lies inside a single value; set that value whole")
    if node.get(name) is None:
        node[name] = {}
    return node[name]


def _list_index(items: list[Yaml], name: str, override: str) -> int:
    """Return the index of a list member, which is named by its number, or of a stage, which may be named by its
    type."""
    by_type = [i for i, item in enumerate(items) if isinstance(item, dict) and item.get("type") == name]
    if by_type:
        return by_type[0]
    there = [str(item["type"]) for item in items if isinstance(item, dict) and "type" in item]
    if there and not name.isdigit():
        remedy = f"add {{type: {name}}} to stages ({', '.join(there)})" if name in STAGES else instead(name, there)
        raise ValueError(f"--set '{override}': no stage {name} here; {remedy}")
    if not name.isdigit() or int(name) >= len(items):
        raise ValueError(
            f"--set '{override}': the list has {counted(len(items), 'member')}, numbered from 0, and '{name}' is none of them; set the list whole"
        )
    return int(name)


def parse_study(tree: object, source: str) -> StudyConfig:
    """Return a checked StudyConfig, for a study that may begin. Raises ValueError with one line per fault."""
    config = parse_stored_study(tree, source)
    limit = tree.get("memory_limit") if isinstance(tree, dict) else None
    try:
        if str(limit).isdigit() and int(str(limit)) < FEWEST_BYTES:
            raise ValueError(
                f"memory_limit: {limit} is {limit} bytes, and without a unit {FEWEST_BYTES:,} are the fewest; write an amount with a unit, such as {limit}GiB"
            )
        check_typed(config)
    except ValueError as error:
        raise ValueError(f"{source} does not describe a study:\n  {error}") from None
    return config


def parse_stored_study(tree: object, source: str) -> StudyConfig:
    """Return the StudyConfig of a study that has begun, which an earlier version may have taken. Raises ValueError with one line per fault."""
    _check_size(tree, source)
    try:
        config = StudyConfig.model_validate(tree)
    except ValidationError as error:
        faults = "\n".join(f"  {line}" for line in fault_lines(error.errors()))
        raise ValueError(f"{source} does not describe a study:\n{faults}") from None
    check_knobs_of(config)
    return config


def _check_size(tree: object, source: str) -> None:
    try:
        num_values = _num_values(tree, {})
    except RecursionError:
        raise ValueError(f"{source} is nested without end, or too deeply; write out what it refers to (&, *)") from None
    if num_values > MOST_VALUES:
        raise ValueError(
            f"{source} refers to its own parts so often that it holds {num_values:,} values, and a study file has at most "
            f"{MOST_VALUES:,}; write out what it needs (&, *)"
        )


def _num_values(value: object, known: dict[int, int]) -> int:
    """Return how many values there are once every reference is written out. known: of the parts that were counted, by
    their identity."""
    if id(value) not in known:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        known[id(value)] = 1 + sum(_num_values(part, known) for part in parts)
    return known[id(value)]
