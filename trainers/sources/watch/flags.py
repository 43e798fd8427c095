"""Which of a script's own options its learning rate and its batch came from: by their names, and because they have these values. Pure."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Recipe = Literal["learning_rate", "micro_batch_size", "gradient_accumulation_steps", "steps"]
_NAMES: Mapping[Recipe, str] = {
    "learning_rate": r"(base_|max_|peak_|init_|initial_)?(lr|learning_rate)",
    "micro_batch_size": r"(?!.*(eval|val|test))(b|.*(batch_size|batch|bs|bsz))",
    "gradient_accumulation_steps": r".*(accum).*",
    "steps": r"(max_|num_|n_|total_|train_)*(iters?|iterations|steps|train_steps|training_steps)",
}
_OF_SCHEDULE = re.compile(
    r"(?=.*(warm_?up|decay|anneal|cool_?down|cycle|cosine|(^|_)lr_|sched|t_max)).*(iters?|iterations|steps|t_max)",
    re.IGNORECASE,
)
"""Of options that count steps of the schedule, such as `lr_decay_iters` and `warmup_steps`."""
_AS_NAMED = re.compile(r"--(\w+)=(.*)")
"""How a script is called that takes an option for each of its names, as nanoGPT does."""
_SET_TO = re.compile(r"(-{0,2}[A-Za-z][\w.-]*=)(.*)")


@dataclass(frozen=True)
class Option:
    flag: str
    """As it is typed: `--lr`, or `--learning_rate=` where the value follows without a space."""
    name: str
    value: Any


def options_of_parser(actions: Iterable[Any], values: Mapping[str, Any]) -> Iterator[Option]:
    """Yield the options of an argument parser that take a value, each by the longest of its flags. actions: the parser's. values: what it has
    parsed."""
    for action in actions:
        flags = [one for one in action.option_strings if one.startswith("-")]
        if flags and action.dest in values and action.nargs != 0:
            yield Option(max(flags, key=len), action.dest, values[action.dest])


def options_by_name(args: Sequence[str], names: Mapping[str, Any]) -> Iterator[Option]:
    """Yield the script's own numbers as options, where it was called with one of them as `--name=value`."""
    called = [match.group(1) for one in args if (match := _AS_NAMED.fullmatch(one))]
    if any(one in names for one in called):
        for name, value in names.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and not name.startswith("_"):
                yield Option(f"--{name}=", name, value)


def options_typed(args: Sequence[str]) -> Iterator[Option]:
    """Yield what was typed with a number, whatever reads it (click, Fire, Hydra, ...): `--lr 0.1`, `--lr=0.1`, `-b 32`, `optimizer.lr=0.1`."""
    for word, following in itertools.pairwise([*args, ""]):
        set_to = _SET_TO.fullmatch(word)
        flag, typed = set_to.groups() if set_to else (word, following)
        if (set_to or re.fullmatch(r"--?[A-Za-z].*", word)) and (value := _number(typed)) is not None:
            name = flag.rstrip("=").lstrip("-").replace("-", "_").rpartition(".")[2]
            yield Option(flag, name, value)


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return None


def flags_of(
    options: Sequence[Option], learning_rates: Sequence[float], samples_per_step: int, run_samples: int | None
) -> dict[str, str]:
    """Return the flags by what they set; what has none, or might have one of two, is not among them.

    learning_rates: of the parameter groups, the first of which is what a study calls its own. samples_per_step: of one process.
    """
    by_kind = {kind: [one for one in options if re.fullmatch(pattern, one.name)] for kind, pattern in _NAMES.items()}
    accumulations = [one for one in by_kind["gradient_accumulation_steps"] if isinstance(one.value, int) and one.value]
    times = accumulations[0].value if len(accumulations) == 1 else 1
    wanted: Mapping[Recipe, Sequence[float]] = {
        "learning_rate": learning_rates,
        "micro_batch_size": [samples_per_step / times],
        "gradient_accumulation_steps": [times],
        "steps": [run_samples / samples_per_step] if run_samples else [],
    }
    found = {
        kind: [one for one in by_kind[kind] if any(_is(one.value, value) for value in wanted[kind])] for kind in _NAMES
    }
    return {kind: ones[0].flag for kind, ones in found.items() if len(ones) == 1}


def factors_of(
    options: Sequence[Option], flags: Mapping[str, str], learning_rate: float, steps: float | None
) -> dict[str, float]:
    """Return, by its flag, what an option is of the number that a study knows: of the first group's learning rate, where it sets that of
    another group, and of the run's steps, where it counts those of a part of the schedule.

    steps: those of the run; None where it has a number of passes.
    """
    found = dict[str, float]()
    for one in options:
        if not isinstance(one.value, int | float) or isinstance(one.value, bool) or one.value <= 0:
            continue
        if one.flag == flags.get("learning_rate") and learning_rate and not _is(one.value, learning_rate):
            found[one.flag] = one.value / learning_rate
        elif steps and one.value > 1 and one.flag != flags.get("steps") and _OF_SCHEDULE.fullmatch(one.name):
            found[one.flag] = one.value / steps
    return found


def _is(value: Any, wanted: float) -> bool:
    return isinstance(value, int | float) and abs(value - wanted) <= 1e-9 * abs(wanted)


def with_values(args: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return a command's arguments with these values. values: by their flags, in either of the two ways to type them."""
    kept, left = list[str](), dict(values)
    words = iter(args)
    for word in words:
        flag, equals, _ = word.partition("=")
        key = next((one for one in (flag, f"{flag}=") if one in values), None)
        if key is None:
            kept.append(word)
            continue
        kept += [f"{flag}={values[key]}"] if equals else [flag, values[key]]
        left.pop(key, None)
        if not equals:
            next(words, None)
    for flag, value in left.items():
        kept += [f"{flag}{value}"] if flag.endswith("=") else [flag, value]
    return kept
