"""How long a script trains: from the loops around its call of backward, and what these end at."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batchscout.trainers.sources.watch.batches import Source, num_samples_in_source
from batchscout.trainers.sources.watch.observer import Place, Seen, value_of
from batchscout.trainers.sources.watch.statements import (
    Loop,
    counted_in,
    ends_at,
    is_over_batches,
    is_set_in,
    range_of,
    rounds_before,
    targets_of,
)


def run_samples(source: Source, seen: Seen, micro_batch_size: int) -> tuple[int, bool] | None:
    """Return the samples that the script's run has, and whether it counts steps, not passes; None where that is not to be seen.

    micro_batch_size: samples of a call of backward.
    """
    loops = [(loop, place) for place in seen.backward.places for loop in seen.loops_of(place)]
    size = num_samples_in_source(source)
    per_pass = math.ceil(size / micro_batch_size) if size is not None and size > micro_batch_size else None
    over_batches = next((loop for loop, _ in loops if isinstance(loop, ast.For) and is_over_batches(loop)), None)
    rounds = [rounds_of(loop, place, per_pass if loop is over_batches else None) for loop, place in loops]
    whole = math.prod(one for one in rounds if one is not None) if loops and None not in rounds else None
    micro_batches_per_step = max(1, seen.steps[-1].num_backwards)
    most: list[float] = [whole] if whole is not None else []
    for number, (loop, place) in enumerate(loops):
        for end in _counted_to(loop, place, [other for other, _ in loops[number + 1 :]]):
            inner = rounds[: end.depth(loops)]
            if None not in inner:
                rounds_within = math.prod(one for one in inner if one is not None)
                most.append(end.value * (micro_batches_per_step if end.is_guarded else rounds_within))
    if not most:
        return None
    samples = min(most) * micro_batch_size
    if per_pass is None or whole is None or min(most) != whole or size is None:
        return int(samples), True
    return int(min(samples, math.ceil(whole / per_pass) * size)), False  # the last batch of a pass may be smaller


@dataclass(frozen=True)
class _End:
    """A count at which a loop ends."""

    value: float
    counts_in: Loop
    """The loop whose rounds are counted."""
    is_guarded: bool
    """Only some of them are: those with an optimizer step."""

    def depth(self, loops: Sequence[tuple[Loop, Place]]) -> int:
        """Return how many loops are within the one whose rounds are counted."""
        return next(n for n, (loop, _) in enumerate(loops) if loop is self.counts_in)


def rounds_of(loop: Loop, place: Place, per_pass: int | None) -> int | None:
    """Return how often a loop goes round; None where only its end tells. per_pass: the batches of a pass, of the loop over these."""
    if not isinstance(loop, ast.For):
        return None
    ends = [end for end in ends_at(loop, place, value_of) if end[0] in targets_of(loop)]
    own = [rounds_before(loop, end, test, place.position[0]) for _, end, test in ends]
    call = range_of(loop)
    if call is not None and ast.unparse(call.func).endswith("islice"):
        end = value_of(call.args[1], place) if len(call.args) == 2 else None
        found = end if isinstance(end, int) else None
    elif call is not None:
        values = [value_of(one, place) for one in call.args]
        found = len(range(*values)) if values and all(isinstance(one, int) for one in values) else None
    elif isinstance(loop.iter, ast.List | ast.Tuple):
        words = any(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in loop.iter.elts)
        found = 1 if words else len(loop.iter.elts)  # of `for phase in ["train", "val"]` one trains
    else:
        found = per_pass
    return min((one for one in (found, *own) if one is not None), default=None)


def _counted_to(loop: Loop, place: Place, around: Sequence[Loop]) -> Iterator[_End]:
    """Yield the ends of a loop that counts what is never set back: steps, or passes of an inner loop."""
    outermost = around[-1] if around else loop
    for name, value, _ in ends_at(loop, place, value_of):
        if (found := counted_in(loop, name)) is not None and not is_set_in(outermost, name):
            yield _End(value, *found)
