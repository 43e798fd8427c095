"""The lines below the title: on what, with what and when the study was run."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from xml.etree.ElementTree import Element

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.recipe import left_open_text
from batchscout.orchestrator.output.plots import element
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.units import bytes_text, number_text, seconds_text
from batchscout.trainers.user_code import SCRIPT

# So many changes of the number of lanes are told.
MOST_STEPS = 8


def setting(config: StudyConfig, study: Study) -> dict[str, str]:
    """Return what is known of model, data, machine, versions and dates, each under its name."""
    facts = study.facts
    told = {
        "model": _joined(_named(config.model.target, config.model.kwargs), _counted(facts.num_parameters, "parameter")),
        "data": _joined(
            _named(config.data.target, config.data.kwargs),
            _counted(facts.num_train_samples, "training sample"),
            _counted(facts.num_val_samples, "validation sample"),
        ),
        "machine": _joined(
            _device(facts.device),
            f"{config.world_size} ranks" if config.world_size > 1 else "",
            f"{bytes_text(limit)} for a rank" if (limit := facts.memory_limit_bytes) is not None else "",
        ),
        "lanes": _lanes(study),
        "versions": ", ".join(f"{name} {number}" for name, number in (facts.versions or {}).items()),
        "run": _dates(study),
        "recipe": "; ".join(study.told),
        "defaults": (left_open_text(config, study.given) or "") if study.given else "",
    }
    return {name: text for name, text in told.items() if text}


def setting_list(config: StudyConfig, study: Study) -> Element:
    lines = [element("div", element("dt", name), element("dd", text)) for name, text in setting(config, study).items()]
    return element("dl", *lines, class_="setting")


def _named(target: str, kwargs: Mapping[str, Any]) -> str:
    """Return what people call a target: of a script that is watched its own name."""
    return str(kwargs["script"]) if target == SCRIPT else target


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _counted(count: int | None, what: str) -> str:
    return "" if count is None else f"{number_text(count)} {what}{'' if count == 1 else 's'}"


def _device(identity: str | None) -> str:
    """Return the device as people read it; by its identity, which ends with the number of its bytes, it is known again."""
    name, _, total = (identity or "").rpartition(", ")
    number = total.removesuffix(" bytes")
    if not number.isdecimal():
        return identity or ""
    return f"{name.replace(', 1 threads', ', 1 thread')}, {bytes_text(int(number))}"


def _lanes(study: Study) -> str:
    """Return how the lanes came and went; empty where they were all there from the beginning."""
    if not study.lanes or study.began is None:
        return ""
    told = [(change.lanes, change.time - study.began) for change in study.lanes]
    steps = [one for one, before in zip(told, [(0, 0.0), *told], strict=False) if one[0] != before[0]]
    shown = [f"{lanes} from {seconds_text(max(0.0, seconds))} on" for lanes, seconds in steps[:MOST_STEPS]]
    more = f" and {len(steps) - MOST_STEPS} more changes" if len(steps) > MOST_STEPS else ""
    return f"up to {max(change.most for change in study.lanes)}: {', '.join(shown)}{more}"


def _dates(study: Study) -> str:
    if study.began is None or study.last is None:
        return ""
    began = datetime.fromtimestamp(study.began, UTC)
    return f"{began:%Y-%m-%d %H:%M} UTC, {seconds_text(study.last - study.began)} from its first event to its last"
