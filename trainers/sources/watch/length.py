"""How long a script trains: from the loops around its call of backward, and what these end at."""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from batchscout.trainers.sources.watch.batches import Source, num_samples_in_source
from batchscout.trainers.sources.watch.observer import Place, Seen, value_of
from batchscout.trainers.sources.watch.statements import (
    Loop,
    changed_by,
    counted_in,
    ends_at,
    handed_on,
    is_over_batches,
    is_over_words,
    is_set_in,
    levels_of,
    parsed,
    rounds_before,
    same_in_each_round,
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
    changing = {id(place): changing_at(place, seen) for place in seen.backward.places}
    rounds = [
        rounds_of(loop, place, per_pass if loop is over_batches else None, changing[id(place)]) for loop, place in loops
    ]
    micro_batches_per_step = max(1, seen.steps[-1].num_backwards)

    def is_of_passes(number: int) -> bool:
        """True if so many of the loops, the innermost ones, go through the samples in each round: with all batches, or the full ones, or full steps."""
        if per_pass is None or size is None:
            return False
        of_a_pass = (per_pass, size // micro_batch_size, per_pass // micro_batches_per_step * micro_batches_per_step)
        within = (one for one in rounds[:number] if one is not None)
        of_loader = (one for one, (loop, _) in zip(rounds[:number], loops, strict=False) if loop is over_batches)
        return any(one in of_a_pass for one in (*itertools.accumulate(within, operator.mul), *of_loader))

    found = list[tuple[int, bool]]()
    if loops and None not in rounds:
        found.append((math.prod(one for one in rounds if one is not None), is_of_passes(len(loops))))
    for number, (loop, place) in enumerate(loops):
        for end in _counted_to(loop, place, [other for other, _ in loops[number + 1 :]], changing[id(place)]):
            depth = next((n for n, (other, _) in enumerate(loops) if other is end.counts_in), None)
            if depth is None or None in rounds[:depth]:
                continue
            within = math.prod(one for one in rounds[:depth] if one is not None)
            is_guarded = end.is_guarded
            found.append(
                (end.value * (micro_batches_per_step if is_guarded else within), not is_guarded and is_of_passes(depth))
            )
    if not found:
        return None
    total, of_passes = min(found, key=lambda one: (one[0], not one[1]))
    samples = total * micro_batch_size
    if not of_passes or per_pass is None or size is None:
        return samples, True
    return min(samples, math.ceil(total / per_pass) * size), False  # the last batch of a pass may be smaller


def changing_at(place: Place, seen: Seen) -> set[str]:
    """Return the names of a place that may stand for something else in a later round of the run's loops, in its function and around it."""
    changing, outer = set[str](), None
    for one in reversed(seen.backward.places):
        tree = parsed(one.file)
        if outer is not None:
            function = levels_of(tree, one.position)[0].owner
            changing = handed_on(parsed(outer.file), outer.position, function, changing)
        changing |= changed_by(seen.loops_of(one), tree)
        if one is place:
            break
        outer = one
    return changing


@dataclass(frozen=True)
class _End:
    """A count at which a loop ends."""

    value: int
    counts_in: Loop
    """The loop whose rounds are counted."""
    is_guarded: bool
    """Only some of them are: those with an optimizer step."""


def rounds_of(loop: Loop, place: Place, per_pass: int | None, changing: Collection[str] = ()) -> int | None:
    """Return how often a loop goes round; None where only its end tells. per_pass: the batches of a pass, of the loop over these. changing: as
    of `ends_at`."""
    if not isinstance(loop, ast.For):
        return None
    ends = [end for end in ends_at(loop, place, value_of, changing) if end[0] in targets_of(loop)]
    own = [rounds_before(loop, end, test, place.position[0]) for _, end, test in ends]
    if not is_over_batches(loop):
        found = _num_of(loop.iter, place)
    elif isinstance(loop.iter, ast.List | ast.Tuple):
        found = 1 if is_over_words(loop) else len(loop.iter.elts)
    else:
        found = per_pass
    return min((one for one in (found, *own) if one is not None), default=None)


def _num_of(over: ast.expr, place: Place) -> int | None:
    """Return how many rounds a loop over something has that counts: those of its range, and no more than what is zipped with it, or sliced, has.
    None where that goes on for ever, or is not known."""
    if not isinstance(over, ast.Call):
        try:
            return len(value_of(over, place))
        except Exception:  # it has no length, or is not known
            return None
    name, parts = ast.unparse(over.func).rpartition(".")[2], over.args
    if name in ("range", "trange", "islice"):
        values = [value_of(one, place) for one in parts[name == "islice" :]]
        count = len(range(*values)) if values and all(isinstance(one, int) for one in values) else None
        counts = [count, _num_of(parts[0], place) if name == "islice" else None]
    elif name == "zip":
        counts = [_num_of(one, place) for one in parts]
    elif name in _ONCE or (name not in _FOR_EVER and parts and isinstance(parts[0], ast.Call)):
        counts = [_num_of(one, place) for one in parts[:1]]
    else:
        counts = []
    return min((one for one in counts if one is not None), default=None)


_ONCE = ("enumerate", "iter", "list", "tuple", "reversed", "sorted", "tqdm", "track", "progress_bar")
_FOR_EVER = ("cycle", "repeat")


def _counted_to(loop: Loop, place: Place, around: Sequence[Loop], changing: Collection[str]) -> Iterator[_End]:
    """Yield the ends of a loop that counts what is never set back: steps, or passes of an inner loop."""
    outermost = around[-1] if around else loop
    known = same_in_each_round(place, value_of, changing)
    for name, value, _ in ends_at(loop, place, value_of, changing):
        if (found := counted_in(loop, name)) is None or is_set_in(outermost, name):
            continue
        counts_in, is_guarded, added = found
        each = known(added)  # and not of `seen += len(x)`
        if isinstance(each, int | float) and each > 0:
            yield _End(math.ceil(value / each), counts_in, is_guarded)
