"""Which of a script's own options its learning rate and its batch came from: by their names, and because they have these values. Pure."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Recipe = Literal[
    "learning_rate", "micro_batch_size", "samples_per_step", "gradient_accumulation_steps", "steps", "micro_batches"
]  # fmt: skip
"""samples_per_step: of one process. micro_batches: of the whole run, in a loop that goes round for each, and steps in some rounds."""
_BATCH = r"(?!.*(eval|val|test))(b|.*(batch_size|batch|bs|bsz))"
_LENGTH = r"(max_|num_|n_|total_|train_)*(iters?|iterations|steps|train_steps|training_steps)"
_NAMES: Mapping[Recipe, str] = {
    "learning_rate": r"(base_|max_|peak_|init_|initial_)?(lr|learning_rate)",
    "micro_batch_size": _BATCH,
    "samples_per_step": _BATCH,
    "gradient_accumulation_steps": r".*(accum).*",
    "steps": _LENGTH,
    "micro_batches": _LENGTH,
}
_OF_SCHEDULE = re.compile(
    r"(?=.*(warm_?up|decay|anneal|cool_?down|cycle|cosine|(^|_)lr_|sched|t_max)).*(iters?|iterations|steps|t_max)",
    re.IGNORECASE,
)
"""Of options that count steps of the schedule, such as `lr_decay_iters` and `warmup_steps`."""
_WARMS_UP = re.compile(r".*warm_?up.*(iters?|iterations|steps)", re.IGNORECASE)
"""Of those that do so in a run of passes, too, where others may count the passes."""
_LOWEST_RATE = re.compile(r"(.*_)?(eta_min|(min|final|end)_?(lr|learning_rate)|lr_(min|final|end))", re.IGNORECASE)
"""Of options that set the lowest rate of a schedule by itself, and not as a share."""
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
            yield Option(flag, _name_of(flag), value)


def _name_of(flag: str) -> str:
    return flag.rstrip("=").lstrip("-").replace("-", "_").rpartition(".")[2]


def sets_rate(flag: str) -> bool:
    """True of a flag that is called as those of a learning rate are."""
    return re.fullmatch(_NAMES["learning_rate"], _name_of(flag)) is not None


def sets_lowest_rate(flag: str) -> bool:
    """True of a flag that is called as those of the lowest rate of a schedule are."""
    return _LOWEST_RATE.fullmatch(_name_of(flag)) is not None


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return None


def flags_and_factors(
    of_each: Sequence[Sequence[Option]],
    learning_rates: Sequence[float],
    micro_batch_size: int,
    accumulation: int,
    steps: float | None,
    passes: float,
) -> tuple[dict[str, str], dict[str, float]]:
    """Return what `flags_of` and `factors_of` find. of_each: the options of each that knows some, the later of which come first."""
    flags, factors = dict[str, str](), dict[str, float]()
    for options in of_each:
        flags |= flags_of(options, learning_rates, micro_batch_size, accumulation, steps)
    length = steps * accumulation if steps and "micro_batches" in flags else steps
    # When all flags are known: a rate that was typed by a short name has a long one in the parser.
    for options in of_each:
        factors |= factors_of(options, flags, learning_rates[0], length, passes)
    return flags, factors


def flags_of(
    options: Sequence[Option],
    learning_rates: Sequence[float],
    micro_batch_size: int,
    accumulation: int,
    steps: float | None,
) -> dict[str, str]:
    """Return the flags by what they set; what has none, or might have one of two, is not among them.

    learning_rates: of the parameter groups, the first of which is what a study calls its own. micro_batch_size, accumulation: of one
    process. steps: those of the run; None where it has no end.
    """
    accumulates = accumulation > 1  # else a micro-batch is a step
    last = {
        one.flag: one for one in options
    }.values()  # a parser may parse twice: what it has known so far, and then all
    wanted: Mapping[Recipe, Sequence[float]] = {
        "learning_rate": learning_rates,
        "micro_batch_size": [micro_batch_size],
        "samples_per_step": [micro_batch_size * accumulation] if accumulates else [],
        "gradient_accumulation_steps": [accumulation],
        "steps": [steps] if steps else [],
        "micro_batches": [steps * accumulation] if steps and accumulates else [],
    }
    found = {
        kind: [one for one in last if re.fullmatch(pattern, one.name) and any(_is(one.value, v) for v in wanted[kind])]
        for kind, pattern in _NAMES.items()
    }
    return {kind: ones[0].flag for kind, ones in found.items() if len(ones) == 1}


def factors_of(
    options: Sequence[Option],
    flags: Mapping[str, str],
    learning_rate: float,
    steps: float | None,
    passes: float = 0,
) -> dict[str, float]:
    """Return, by its flag, what an option is of the number that a study knows: of the first group's learning rate, where it sets that of
    another group or the lowest one of the schedule, and of the run's steps, where it counts those of a part of the schedule.

    flags: all that were found, by `flags_of`. steps: those of the run, or its micro-batches where a flag counts these; None where it has no
    end. passes: over the data, in a run that counts these, as parts of its schedule then may; 0 in one that counts steps.
    """
    counts = _WARMS_UP if passes else _OF_SCHEDULE
    found = dict[str, float]()
    for one in {one.flag: one for one in options}.values():
        if not isinstance(one.value, int | float) or isinstance(one.value, bool) or one.value <= 0:
            continue
        of_another_group = one.flag == flags.get("learning_rate") and not _is(one.value, learning_rate)
        is_lowest = one.value < learning_rate and _LOWEST_RATE.fullmatch(one.name) is not None
        if learning_rate and (of_another_group or is_lowest):
            found[one.flag] = one.value / learning_rate
        elif steps and one.value > max(1, passes) and one.flag not in flags.values() and counts.fullmatch(one.name):
            found[one.flag] = one.value / steps
    return found


def _is(value: Any, wanted: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value - wanted) <= 1e-9 * abs(wanted)


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
        for one in (flag, f"{flag}="):
            left.pop(one, None)
        if not equals:
            next(words, None)
    for flag, value in left.items():
        kept += [f"{flag}{value}"] if flag.endswith("=") else [flag, value]
    return kept
