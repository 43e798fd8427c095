"""Which of several is the fastest, from timings in turns, each compared with the others of its round alone.

Pure: rates in, ratios with intervals out. A log rate is taken to be that of what is timed, plus that of its round, plus
noise (a two-way layout): a round that is slow for all of them says nothing about their order. With two of them this is
Student's interval of the paired log ratios; with more, all of them tell how much timings scatter.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Literal, TypeVar

from batchscout.trainers.noise.student_t import t_quantile

# The intervals of all pairs that are compared hold together with this probability (Bonferroni): the fastest of several
# equals seems faster than it is.
CONFIDENCE = 0.95
# Whether a rival is faster by less than this share is not worth another round.
MARGIN = 0.05
# Of those that are this close to the fastest, one may be preferred for another reason.
TIE = 0.02
# A round is disturbed if a rate in it, beside another, is off its usual by this factor and by so many robust standard
# deviations: on a machine that is noisy all the time no round stands out, and intervals are wide instead.
DISAGREEMENT = 1.5
OUTLYING = 6.0
# A GPU is timed for so long: in a tenth of a second neither its clock nor NVML's power, a mean over one, has settled.
GPU_TIMING_SECONDS = 2.0
# A probe, which only says what is worth timing, runs without statistics for so long: their hooks favour large batches.
GPU_PROBE_SECONDS = 0.5
# The median absolute deviation of normal values, as a share of their standard deviation.
_MAD_SHARE = 0.6745
# A machine on which single timings scatter by more than this share is busy with something else.
BUSY = 0.1

Order = Literal["slower", "tied", "undetermined"]
"""How a rival stands to what was chosen: it is slower; it may be as fast, and not faster by more than MARGIN; or it may
be faster by more."""

MOST_TOLD = 10.0
"""An interval that reaches beyond it is that of rounds with nothing in common, and no figure that anyone could use."""

Name = TypeVar("Name")


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one is as another within the same rounds, with its interval."""

    point: float
    low: float
    high: float | None
    """None if a single round was timed, which says nothing about how much timings scatter."""
    num_rounds: int

    def __str__(self) -> str:
        if self.high is None:
            return f"{self.point:.2f} x in a single round"
        if self.high > MOST_TOLD:
            return f"{self.point:.2f} x in {self.num_rounds} rounds, which differ so much that they do not say more"
        return f"{self.point:.2f} x [{self.low:.2f}, {self.high:.2f}] in {self.num_rounds} rounds"

    @property
    def order(self) -> Order:
        if self.exceeds(1 + MARGIN):
            return "undetermined"
        return "tied" if self.exceeds(1.0) else "slower"

    def exceeds(self, limit: float) -> bool:
        """True if the ratio may be above the limit."""
        return self.high is None or self.high > limit


@dataclass(frozen=True)
class Timings(Generic[Name]):
    """The rates of what is timed in turns, by round: all were timed in the same rounds, of which there is at least
    one."""

    rates: Mapping[Name, Mapping[int, float]]
    seen_disturbed: Collection[int] = ()
    """The rounds in which something else was seen at work, or a GPU slowed itself down."""

    @cached_property
    def disturbed(self) -> tuple[int, ...]:
        """The rounds in which something took the machine from some of them and not from others, and those that were seen to be
        disturbed: they do not count."""
        usual = {name: statistics.median(logs.values()) for name, logs in self._logs.items()}
        off = {number: [self._logs[name][number] - usual[name] for name in usual] for number in self._timed_rounds}
        residuals = [abs(one - statistics.median(round)) for round in off.values() for one in round]
        limit = max(math.log(DISAGREEMENT), OUTLYING * statistics.median(residuals) / _MAD_SHARE)
        return tuple(n for n, round in off.items() if n in self.seen_disturbed or max(round) - min(round) > limit)

    @cached_property
    def rounds(self) -> tuple[int, ...]:
        """The rounds that count: those that are not disturbed, or all of them where every one is."""
        return tuple(number for number in self._timed_rounds if number not in self.disturbed) or self._timed_rounds

    @property
    def num_quiet_rounds(self) -> int:
        """How many rounds nothing disturbed."""
        return len(self._timed_rounds) - len(self.disturbed)

    @cached_property
    def spread(self) -> float | None:
        """The standard deviation of a single timing, as a share of its rate; None where one round, or one name, cannot
        tell."""
        degrees = self._degrees_of_freedom
        if not degrees:
            return None
        means = {name: self._mean(name) for name in self.rates}
        squares = 0.0
        for number in self.rounds:
            off = [self._logs[name][number] - mean for name, mean in means.items()]
            squares += sum((one - statistics.fmean(off)) ** 2 for one in off)
        return math.sqrt(squares / degrees)

    @property
    def busy(self) -> bool:
        """True if the rounds disagree, or timings scatter, by more than on a machine that does nothing else."""
        return bool(self.disturbed) or (self.spread or 0.0) > BUSY

    def unrest(self) -> str:
        """Return in words by how much the timings disagree."""
        said = [f"they scatter by {self.spread:.0%} within their rounds"] if self.spread else []
        if self.disturbed and not self.num_quiet_rounds:
            said.append("every round was disturbed, so that all of them count")
        elif self.disturbed:
            rounds = ", ".join(map(str, self.disturbed))
            one = len(self.disturbed) == 1
            said.append(
                f"round {rounds} was disturbed and does not count"
                if one
                else f"rounds {rounds} were disturbed and do not count"
            )
        return ", and ".join(said)

    def rate(self, name: Name) -> float:
        """Return the geometric mean of its rates: two such means have the ratio that was found within the rounds."""
        return math.exp(self._mean(name))

    def interval(self, name: Name) -> tuple[float, float] | None:
        """Return the ends of the rate's 95 % interval within its rounds; None where nothing tells it.

        What moves all of a round alike is left out, so that two of these intervals say how well a ratio is known.
        """
        error = self._error(num_pairs=1)
        return None if error is None else (self.rate(name) * math.exp(-error), self.rate(name) * math.exp(error))

    def deviation(self) -> float | None:
        """Return the standard error of a rate's logarithm within the rounds; None where nothing tells it.

        Where every round was disturbed, a few of them may agree by chance: each of their timings may be off by DISAGREEMENT.
        """
        if self.spread is None:
            return None
        single = self.spread if self.num_quiet_rounds else max(self.spread, math.log(DISAGREEMENT))
        return single / math.sqrt(len(self.rounds))

    def ratio(self, one: Name, other: Name, num_compared: int | None = None) -> Ratio:
        """Return how many times as fast `one` is as `other`.

        num_compared: among how many one of them was picked by these timings; None for all that are timed.
        """
        log_ratio = self._mean(one) - self._mean(other)
        error = self._error(math.comb(num_compared or len(self.rates), 2))
        if error is None:
            return Ratio(math.exp(log_ratio), 0.0, None, len(self.rounds))
        both = math.sqrt(2) * error
        return Ratio(math.exp(log_ratio), math.exp(log_ratio - both), math.exp(log_ratio + both), len(self.rounds))

    def fastest_first(self, names: Iterable[Name] | None = None) -> list[Name]:
        return sorted(self.rates if names is None else names, key=self._mean, reverse=True)

    def tied(self) -> list[Name]:
        """Return the fastest, and those that are close to it and certainly not much slower."""
        best, *rivals = self.fastest_first()
        near = [name for name in rivals if self.rate(name) >= (1 - TIE) * self.rate(best)]
        return [best, *(name for name in near if self.ratio(name, best).low >= 1 / (1 + MARGIN))]

    def is_clear(self, names: Collection[Name] | None = None) -> bool:
        """True if none of these can be much faster than the one that seems the fastest."""
        best, *rivals = self.fastest_first(names)
        return not any(self.ratio(name, best, 1 + len(rivals)).exceeds(1 + MARGIN) for name in rivals)

    @cached_property
    def _logs(self) -> dict[Name, dict[int, float]]:
        return {name: {n: math.log(rate) for n, rate in rounds.items()} for name, rounds in self.rates.items()}

    @property
    def _timed_rounds(self) -> tuple[int, ...]:
        return tuple(sorted(next(iter(self.rates.values()))))

    @property
    def _degrees_of_freedom(self) -> int:
        return (len(self.rates) - 1) * (len(self.rounds) - 1)

    def _mean(self, name: Name) -> float:
        return statistics.fmean(self._logs[name][number] for number in self.rounds)

    def _error(self, num_pairs: int) -> float | None:
        """Return half the interval of a mean log rate; that of a ratio of two is longer by the square root of 2."""
        if self.spread is None:
            return None
        probability = 1 - (1 - CONFIDENCE) / 2 / num_pairs
        return t_quantile(self._degrees_of_freedom, probability) * self.spread / math.sqrt(len(self.rounds))


def in_turn(names: Sequence[Name], number: int, num_lanes: int) -> list[Name]:
    """Return what is timed in the order in which a round begins it. On several lanes each round begins with another one, so
    that none of them is always timed on the same node."""
    first = (number - 1) % len(names) if num_lanes > 1 and names else 0
    return [*names[first:], *names[:first]]


def rounds_wanted(at_least: int, at_most: int, suffice: Callable[[int], bool], has_begun: Callable[[int], bool]) -> int:
    """Return how many rounds to time by now: one more while so many do not suffice. at_least is never cut short, as many rounds
    may be disturbed and are timed again, and a round that has begun is wanted, whatever would be decided today."""
    most = max(at_least, at_most) + at_least
    wanted = (number for number in range(at_least, most) if not has_begun(number + 1) and suffice(number))
    return next(wanted, most)


def held_against(rival: str, ratio: Ratio) -> str:
    """Return where a rival stands to what was chosen, with the paired figures that put it there."""
    match ratio.order:
        case "slower":
            return f"{rival} reaches {ratio}"
        case "tied":
            return f"{rival} may be as fast: {ratio}"
        case "undetermined":
            return f"undetermined whether {rival} is faster: {ratio}"
