"""Two studies beside each other: what was different between them, and whether their answers are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.output.loaded import load
from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.orchestrator.output.report.setting import setting
from batchscout.orchestrator.output.report.tables import config_text
from batchscout.orchestrator.output.rows import labelled_lines, table_lines
from batchscout.orchestrator.output.shown import Terminal, shown
from batchscout.orchestrator.stages.train import trained
from batchscout.orchestrator.stages.train.choice import SAME_RATE
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.storage.place import RunPlace
from batchscout.orchestrator.units import bytes_text, probability_text, rate_text, share_text
from batchscout.trainers.files import quoted
from batchscout.trainers.metrics import metric_of

ANSWER = (
    "micro_batch_size", "micro_batch_tokens", "gradient_accumulation_steps", "world_size", "effective_batch_size",
    "activation_checkpointing", "compile",
    "precision", "cross_entropy", "memory_knobs", "learning_rate", "warmup_samples", "sample_budget", "ramp", "model_changes",
    "parallel", "peft", "allow_tf32", "ema_half_life_samples", "batch_norm",
)  # fmt: skip
SURE = ("p_best", "regret_time")
MEASURED = ("val_loss", "tokens_per_second", "peak_memory_bytes", "train_seconds", "noise_scale")


_WORDS = {"p_best": "P(best)", "regret_time": "wastes on average", "tokens_per_second": "speed"}


@dataclass(frozen=True)
class Side:
    """One of the two studies."""

    label: str
    """What it is called beside the other."""
    config: StudyConfig
    study: Study
    recommendation: Recommendation | None

    @property
    def verdict(self) -> str:
        return self.recommendation.verdict if self.recommendation else "no recommendation"


@dataclass(frozen=True)
class Difference:
    """Something that is not the same in the two studies."""

    key: str
    values: tuple[JsonValue, JsonValue]
    """Those of the first and the second; None where one has no such key."""
    texts: tuple[str, str]
    """The same as people read them."""

    @property
    def name(self) -> str:
        """What people call it; a key of the study file or of the recommendation has its own name."""
        return _WORDS.get(self.key) or (metric_of(self.key).heading if self.key in MEASURED else self.key)


@dataclass(frozen=True)
class Comparison:
    """All that is not the same, and what it comes to."""

    labels: tuple[str, str]
    same_answer: bool | None
    """None where one of the two has no recommendation."""
    agreement: str
    """The same in a sentence."""
    verdicts: tuple[str, str]
    answers: tuple[Difference, ...]
    machine_and_data: tuple[Difference, ...]
    study_files: tuple[Difference, ...]

    def to_json(self) -> dict[str, JsonValue]:
        """Return what `compare --json` prints; of everything that differs the first one's value and the second one's."""
        told = {"answers": self.answers, "machine_and_data": self.machine_and_data, "study_files": self.study_files}
        return {
            "studies": list(self.labels),
            "same_answer": self.same_answer,
            "agreement": self.agreement,
            "verdicts": list(self.verdicts),
            **{name: {one.key: list(one.values) for one in differences} for name, differences in told.items()},
        }


def read_sides(first: Path, second: Path, places: tuple[RunPlace, RunPlace] | None = None) -> tuple[Side, Side]:
    """Return the two studies that these run directories hold. places: where people know them, if these are copies of what an object store
    has. Raises ValueError where there are no two."""
    one, other = places or (first, second)
    if _parts(one) == _parts(other):
        raise ValueError(f"{quoted(str(one))} is given twice; to compare, give the run directories of two studies")
    sides = [
        Side(label, study.config, study.replayed, study.recommendation)
        for label, study in zip(labels(one, other), map(load, (first, second)), strict=True)
    ]
    return sides[0], sides[1]


def compared(first: Side, second: Side) -> Comparison:
    both_answer = first.recommendation is not None and second.recommendation is not None
    return Comparison(
        labels=(first.label, second.label),
        same_answer=not _settings_that_differ(first, second) if both_answer else None,
        agreement=agreement(first, second),
        verdicts=(first.verdict, second.verdict),
        answers=_differences(first, second, _answers),
        machine_and_data=_differences(first, second, _machine),
        study_files=_differences(first, second, lambda side: keys_of(side.config)),
    )


def _differences(
    first: Side, second: Side, values: Callable[[Side], Mapping[str, JsonValue]]
) -> tuple[Difference, ...]:
    one, other = values(first), values(second)
    return tuple(
        Difference(key, (a, b), (_text(key, a, first), _text(key, b, second)))
        for key in dict.fromkeys([*one, *other])
        if (a := one.get(key)) != (b := other.get(key))
    )


def _settings_that_differ(first: Side, second: Side) -> list[str]:
    """Return the keys of the answers in which these differ. Where both studies ask for runs of one length, how many samples are trained on in
    that, and warmed up, follows from the measured speeds, which no two studies have alike."""
    one, other = _answers(first), _answers(second)
    apart = {*SURE, *MEASURED}
    if _length_of(first.config) == _length_of(second.config):
        apart |= {"sample_budget", "warmup_samples"}
    if first.recommendation and second.recommendation and _have_one_rate(first.recommendation, second.recommendation):
        apart.add("learning_rate")
    return [key for key in {**one, **other} if key not in apart and one.get(key) != other.get(key)]


def _length_of(config: StudyConfig) -> tuple[object, ...]:
    return config.objective, config.target_loss, config.sample_budget, config.real_run, config.optimizer.warmup


def _have_one_rate(one: Recommendation, other: Recommendation) -> bool:
    """True if their learning rates are one, but for what rounding and the draws of a surface make of it."""
    return math.isclose(one.learning_rate, other.learning_rate, rel_tol=SAME_RATE)


def agreement(first: Side, second: Side) -> str:
    """Return whether the two recommend the same, in a sentence."""
    one, other = first.recommendation, second.recommendation
    if one is None or other is None:
        without = " and ".join(side.label for side in (first, second) if side.recommendation is None)
        return f"There is nothing to compare yet: no recommendation in {without}."
    differ = _settings_that_differ(first, second)
    if not differ:
        return "Both recommend the same."
    batches, rates = (one.effective_batch_size, other.effective_batch_size), (one.learning_rate, other.learning_rate)
    is_one_batch, is_one_rate = batches[0] == batches[1], _have_one_rate(one, other)
    batch = f"the effective batch {_moved(*batches, 'd', stays=is_one_batch)}"
    rate = f"the learning rate {_moved(*rates, '.3g', stays=is_one_rate)}"
    beside = f"; what differs is {', '.join(differ)}" if is_one_batch and is_one_rate else ""
    doubt = _doubt_of_batches(one, other) or _doubt_of_rates(first, second, one, other)
    return f"The answer differs: {batch}, {rate}{beside}. {doubt}".strip()


def _moved(one: float, other: float, form: str, *, stays: bool) -> str:
    return f"stays {one:{form}}" if stays else f"goes from {one:{form}} to {other:{form}}"


def _doubt_of_batches(one: Recommendation, other: Recommendation) -> str:
    """Return why the difference of the batches need not mean anything; nothing where it does."""
    batches = {one.effective_batch_size, other.effective_batch_size}
    open_in_both = batches <= {*one.undecided_between} and batches <= {*other.undecided_between}
    return "Neither study could tell these two batches apart." if len(batches) == 2 and open_in_both else ""


def _doubt_of_rates(first: Side, second: Side, one: Recommendation, other: Recommendation) -> str:
    """Return the same of the learning rates of one batch, where both lie in where either study found the best of that batch."""
    rates = (one.learning_rate, other.learning_rate)
    if (
        one.effective_batch_size != other.effective_batch_size
        or _have_one_rate(one, other)
        or one.real_run
        or other.real_run
    ):
        return ""
    for side in (first, second):
        findings = trained(side.study)
        best = findings.of_batch(one.effective_batch_size) if findings else None
        if best is None or not all(best.learning_rate_low <= rate <= best.learning_rate_high for rate in rates):
            return ""
    return "Neither study could tell these two learning rates apart."


def _answers(side: Side) -> dict[str, JsonValue]:
    if side.recommendation is None:
        return {}
    values = side.recommendation.to_json()
    evidence = values["evidence"]
    assert isinstance(evidence, dict)
    return {
        **{key: values.get(key) for key in (*ANSWER, *SURE)},
        **dict(_flat({key: values.get(key) for key in ("optimizer", "schedule")}, "")),
        **{key: evidence.get(key) for key in MEASURED},
    }


def _machine(side: Side) -> dict[str, JsonValue]:
    return {name: text for name, text in setting(side.config, side.study).items() if name != "run"}


def keys_of(config: StudyConfig) -> dict[str, JsonValue]:
    """Return every key of a study file by its path, such as `optimizer.lr`; a stage's begin with its type."""
    tree = config.model_dump(mode="json")
    tree["stages"] = {stage["type"]: {k: v for k, v in stage.items() if k != "type"} for stage in tree["stages"]}
    return dict(_flat(tree, ""))


def _flat(tree: Mapping[str, JsonValue], path: str) -> Iterator[tuple[str, JsonValue]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _text(key: str, value: JsonValue, side: Side) -> str:
    if isinstance(value, (int, float)):
        if key == "tokens_per_second":  # it counts tokens in one study and samples in another
            return rate_text(value, side.study.facts.rate_unit)
        if key == "p_best":
            return probability_text(value)
        if key == "regret_time":
            return f"{share_text(value)} of the {'samples' if side.config.objective == 'samples' else 'training time'}"
        if key in MEASURED:
            return metric_of(key).text(value)
    if isinstance(value, list):
        return ", ".join(map(config_text, value)) or "[]"
    if isinstance(value, (int, float)) and key.endswith(("_bytes", "memory_limit")):
        return bytes_text(value)
    return config_text(value)


def _parts(place: RunPlace) -> tuple[str, ...]:
    """Return the folders that lead to a run directory, and its own name."""
    return (
        place.absolute().parts
        if isinstance(place, Path)
        else tuple(place.at("").partition("?")[0].rstrip("/").split("/"))
    )


def labels(first: RunPlace, second: RunPlace) -> tuple[str, str]:
    """Return the names of two run directories, with as much of their paths as tells them apart."""
    one, other = _parts(first), _parts(second)
    length = 1
    while one[-length:] == other[-length:] and length < max(len(one), len(other)):
        length += 1
    return "/".join(one[-length:]), "/".join(other[-length:])


def print_comparison(both: Comparison) -> None:
    """Print, for people, whether the answers differ, and all that does."""
    console = Terminal()
    console.print(shown(" and ".join(both.labels), style="bold"))
    console.print(shown(both.agreement, style="green" if both.same_answer else "yellow"))
    verdicts = list(zip(both.labels, both.verdicts, strict=True))
    told = {
        "the answers": both.answers,
        "the machine and the data": both.machine_and_data,
        "the study files": both.study_files,
    }
    console.print_lines(labelled_lines(verdicts, console.width, indent=0))
    for title, differences in told.items():
        console.print(shown(f"\n{title}{'' if differences else ': no difference'}", style="bold"))
        if differences:
            rows = [(one.name, *one.texts) for one in differences]
            console.print_lines(table_lines(("", *both.labels), rows, console.width))
