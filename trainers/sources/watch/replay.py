"""The loss of a batch as a script computes it: its own statements, called again. One that does not give the loss and the gradient that
were seen is not used."""

from __future__ import annotations

import ast
import contextlib
import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from batchscout.trainers.errors import NoStudy
from batchscout.trainers.sources.watch.batches import Batches, FromLoader, FromRows
from batchscout.trainers.sources.watch.bindings import (
    BATCH,
    WITH_BATCHES,
    Bound,
    bindings,
    changing,
    changing_at,
    fetches,
    holds_a_graph,
    is_another_later,
    of_several_loaders,
    roots_of,
    with_batches,
    without_rows,
)
from batchscout.trainers.sources.watch.copies import Copies, give_back
from batchscout.trainers.sources.watch.handed import is_of_numbers
from batchscout.trainers.sources.watch.observer import Backward, Enough, Place, RandomState, Seen, unwrapped, value_of
from batchscout.trainers.sources.watch.statements import (
    LossCode,
    levels_of,
    loss_codes,
    may_be_made_first,
    needed,
    parsed,
    reads_of,
    targets_of,
    walk_own,
)

SAME = 1e-5
"""So far, as a share of what was seen, the replayed loss and gradient may be off."""
SAME_AGAIN = 1e-2
"""So far, as a share, the loss of a batch that comes twice may differ: what spectral_norm keeps is another then."""
LOSS_MODULE = "batchscout_loss_of_a_script"
_LATER = "__as_it_was__"
_COUNTS = (1, 2, 3, 2_015_999, 2_016_000)
"""Numbers of a batch at which its loss is tried: after the first, far behind any warm-up, and the last and the first of every 2 to 10, 12, 14, 15, 16, ...
256, 500, 1000."""


@dataclass(frozen=True)
class LossOfBatch:
    """The script's statements between a batch and its loss, as a function of the batch."""

    text: str
    call: Callable[[Any], Tensor]
    factor: float
    """By which the script multiplies it before backward, outside of these statements."""
    divided_by: int
    """The micro-batches of a step, where these statements divide it by so many; else 1."""
    batches: Batches
    place: Place
    code: LossCode


@dataclass(frozen=True)
class NotReplayed:
    """Why the loss could not be had from a script's own statements."""

    reason: str
    batches: Batches | None
    """Those of the loader that was asked last; None where that would not do: there is none, or a study would keep as it was what is
    another in each batch."""


def loss_of(seen: Seen) -> LossOfBatch | NotReplayed:
    """Return the loss of a batch. What is tried first is what scripts do most: a loop over a DataLoader, then a call that returns
    batches, then the same tensors in every step."""
    reasons, others, changes, of_one_size = list[str](), list[str](), False, list[str]()
    for place, code in _codes(seen.backward):
        if carried := _carried(code, place):
            # A wider piece of the script would hide it; and what a narrower one has told says more.
            return NotReplayed([*others, *reasons, carried][0], None if changes else _of_a_loader(seen))
        if several := of_several_loaders(code, place, seen):
            return NotReplayed(several, None)
        for bound in bindings(code, place, seen):
            frozen = _frozen(code, place, bound, seen)
            counters = frozen.counters if frozen is not None else ()
            if frozen is not None and not _same_at_every_count(code, place, bound, seen, counters):
                others.append(frozen.reason)
                changes |= not frozen.is_state
                continue
            found = _function(code, place, _counting(bound, code, counters, _COUNTS[0]))
            factor = _replayed(found, bound, seen)
            if (
                not isinstance(factor, str)
                and isinstance(bound.source, FromRows)
                and (fault := _fault_of_some_rows(found, bound, seen))
            ):
                of_one_size.append(fault)
                continue
            if not isinstance(factor, str) and (fault := _fault_of_another(found, bound, seen)) is not None:
                resets = [one for one in code.resets if _is_known(one, bound, seen)]
                tried = [*((one,) for one in resets), *([tuple(resets)] if len(resets) > 1 else [])]
                again = (_function(code, place, _counting(bound, code, counters, _COUNTS[0]), some) for some in tried)
                begun = next((one for one in again if _fault_of_another(one, bound, seen) is None), None)
                if begun is None and fault:
                    return NotReplayed(fault, _of_a_loader(seen))
                found = begun or found
            if not isinstance(factor, str):
                divided_by = _divided_by(code, place, bound, seen)
                sys.modules[LOSS_MODULE] = found.module  # and not of what was tried last
                batches = Batches(bound.source, bound.seen)
                return LossOfBatch(found.text, found.call, factor, divided_by, batches, place, code)
            reasons.append(factor)
    if seen.same_in_each_step and (of_one_size or not seen.backward.fetched):
        raise NoStudy(_WHOLE)
    if not seen.backward.fetched:
        why = (without_rows(code, place, seen) for place, code in _codes(seen.backward))
        reasons = [*filter(None, why), *reasons]
    reasons = [
        *of_one_size,
        *others,
        *reasons,
    ]  # what gave the loss that was seen says most, and what came of trying least
    reason = reasons[0] if reasons else "no loop was found that takes a batch, computes its loss and calls backward"
    return NotReplayed(reason, None if changes else _of_a_loader(seen))


_WHOLE = (
    "it trains on the same data in every step (a whole graph, or all points at once), and its loss is not one of rows that could be taken by "
    "themselves: they cannot be split into batches, so there is no batch size to choose; have a loader give it parts, as tuples or dictionaries of "
    "tensors that have a row for each sample"
)


def _fault_of_another(made: _Made, bound: Bound, seen: Seen) -> str | None:
    """Return what happens if the first batch comes once more, with the same random numbers: an error's text, or nothing where its loss is
    another; None where it is the same."""
    losses = list[float]()
    try:
        with _on_copies(seen), torch.enable_grad():
            for _ in range(2):
                (bound.random or seen.backward.random).put_back()
                loss = made.call(copy.deepcopy(bound.seen))
                loss.backward()
                losses.append(float(loss.detach()))
    except (Exception, Enough) as error:  # of the script's code
        return (
            f"its modules keep a state from one batch to the next ({type(error).__name__}: {str(error).partition('.')[0]}), and no statement of "
            "its loop was found that resets it"
        )
    return None if math.isclose(*losses, rel_tol=SAME_AGAIN) else ""


def _is_known(reset: ast.stmt, bound: Bound, seen: Seen) -> bool:
    """True if what it reads stays as it was, or is of the batch."""
    return not reads_of(reset) & changing(seen) - bound.names


def _fault_of_some_rows(made: _Made, bound: Bound, seen: Seen) -> str | None:
    """Return why the loss of half of the rows cannot be computed; None where it can: what else it reads goes with any of them."""
    try:
        with _on_copies(seen):
            made.call([one[: len(one) // 2] for one in copy.deepcopy(bound.seen)])
    except (Exception, Enough) as error:  # of the script's code, which has only ever had all of them
        return f"its statements take batches of one size alone: with half of the rows they raised {type(error).__name__}: {error}"
    return None


@contextlib.contextmanager
def _on_copies(seen: Seen) -> Iterator[Copies]:
    """Within this, the script's statements work on a copy of what it trains, and draw random numbers that nobody misses."""
    copies, outer = Copies(seen), RandomState.now()
    try:
        copies.put_in_use(seen)
        yield copies
    finally:
        give_back(seen, copies.number)
        outer.put_back()


def _of_a_loader(seen: Seen) -> Batches | None:
    last = next(iter(seen.backward.fetched), None)
    return last and Batches(FromLoader(last.loader), last.batch)


def _codes(backward: Backward) -> Iterator[tuple[Place, LossCode]]:
    """Yield where the loss may be made: the place that calls backward, and those that have handed the loss on to it; of the script before those
    of a library that has the loop."""
    within = itertools.takewhile(lambda one: not one.is_the_scripts, backward.all_places)
    for number, place in itertools.chain(enumerate(backward.places), enumerate(within)):
        name = None
        if number:
            name = next((name for name, value in place.local.items() if value is backward.loss), None)
            if name is None:
                continue
        for code in loss_codes(parsed(place.file), place.position, name):
            yield place, code


def _carried(code: LossCode, place: Place) -> str | None:
    """Return what a loss takes over from the batch before; None where there is nothing."""
    given = targets_of(code.loop) if isinstance(code.loop, ast.For) else set()
    for name in sorted(code.inputs & code.changed - given):
        value = place.get(name)
        if holds_a_graph(value) and not may_be_made_first(code, name):
            return (
                f"its loss reads {name}, which the step before has left (a hidden state that is carried on), and a study begins each "
                "batch anew"
            )
    return None


def _of_this_batch(code: LossCode, name: str, value: Any) -> bool:
    """True of what the statements have computed of the batch on whose gradient it hangs."""
    return holds_a_graph(value) and may_be_made_first(code, name)


@dataclass(frozen=True)
class _Frozen:
    """What a study would keep as it was in the first batch."""

    reason: str
    is_state: bool = False
    """True of what the loop has computed itself, as a hidden state that is cut off from its graph: a loss can be written without it."""
    counters: tuple[str, ...] = ()
    """The names, where all of it are numbers that count batches, steps or epochs."""


def _frozen(code: LossCode, place: Place, bound: Bound, seen: Seen) -> _Frozen | None:
    """Return what a loss reads that is another in every batch and does not come from it: a study would keep it as it was in the first;
    None where there is nothing."""
    counted = {name for one in bound.begin for name in _given_a_number(one)}
    kept, loss, read = _batched(code, bound)
    if (call := fetches(kept, place)) is not None:
        return _Frozen(
            f"its loss fetches a batch besides its own ({call}), and a study trains on the samples of one loader; let one give all, of a data "
            "set whose samples hold one of each"
        )
    innermost = next(iter(seen.backward.all_loops), None)
    for name in sorted(read & (targets_of(innermost) if isinstance(innermost, ast.For) else set())):
        if isinstance(place.get(name), nn.Module):
            return _Frozen(
                f"its loss is that of {name}, a part of the model that is another in each round of a loop, and a study would train the first alone; add the "
                "losses of all up, and call backward once"
            )
    changes, counters = changing_at(place, seen), dict[str, _Frozen]()
    for name in sorted(read):
        root = name.split(".")[0]
        value = place.get(name)
        if _of_this_batch(code, name, value) or _is_accumulation(name, value, seen):
            continue
        is_plain = isinstance(value, int | float | str | Tensor) or is_of_numbers(value)
        is_another = name in changes or root in changes or ("." not in name and is_another_later(name, place, seen))
        if is_plain and (name in counted or (root not in bound.names and is_another)):
            found = _Frozen(
                _ANOTHER.format(name=name),
                is_state=name in code.changed and isinstance(value, Tensor) and value.is_floating_point(),
            )
            if not isinstance(value, int) or isinstance(value, bool):
                return found
            counters[name] = found
    of_others = {name for name in read if name.split(".")[0] not in bound.names}
    if (key := _set_by_key([*kept, ast.Expr(loss)], of_others, place, seen)) is not None:
        return _Frozen(_ANOTHER.format(name=key))
    if (twin := _twin(read, place, seen)) is not None:
        return _Frozen(
            f"its loss reads {twin}, a module of the same shape as the one that is trained, as an average of its weights or a teacher is: a study "
            "would keep it as it was"
        )
    return next((replace(one, counters=tuple(counters)) for one in counters.values()), None)


_ANOTHER = (
    "its loss reads {name}, which is another in later batches and does not come from the batch, and a study would keep it as it was in the first; "
    "compute it from the batch, or let a DataLoader give it"
)


def _set_by_key(statements: Sequence[ast.stmt], given: set[str], place: Place, seen: Seen) -> str | None:
    """Return what these read of a dictionary or list, as `weights["kl"]`, where it is a number that loops, or the functions that they call on the way, set anew
    of what changes; None where there is nothing. given: the names that they read before they assign them, but those of the batch."""
    nodes = [node for one in statements for node in (one, *walk_own(one))]
    own = {ast.unparse(target) for one in nodes if isinstance(one, ast.Assign) for target in one.targets}
    by_key = [one for one in nodes if isinstance(one, ast.Subscript) and isinstance(value_of(one, place), int | float)]
    read = {ast.unparse(one) for one in by_key if needed([], one)[1] <= given} - own
    is_within = False
    for at in reversed(seen.backward.places):
        loops, changes = seen.loops_of(at), changing_at(at, seen)
        bodies = [levels_of(parsed(at.file), at.position)[0].owner] if is_within else loops[-1:]
        for one in (inner for body in bodies for inner in walk_own(body)):
            match one:
                case ast.AugAssign(target=ast.Subscript() as target):
                    is_another = True
                case ast.Assign(targets=[ast.Subscript() as target], value=value):
                    is_another = bool(needed([], value)[1] & changes)
                case _:
                    continue
            if is_another and ast.unparse(target) in read:
                return ast.unparse(target)
        is_within |= bool(loops)
    return None


def _is_accumulation(name: str, value: Any, seen: Seen) -> bool:
    """True of the number of micro-batches of a step, by its name and its value: the last step of a pass may have fewer."""
    return type(value) is int and "accum" in name and value == max(1, seen.steps[-1].num_backwards)


def _same_at_every_count(code: LossCode, place: Place, bound: Bound, seen: Seen, counters: tuple[str, ...]) -> bool:
    """True if loss and gradient of the first batch would be as they were seen, had it another number: the number is only printed, say."""
    made = (_function(code, place, _counting(bound, code, counters, count)) for count in _COUNTS)
    return bool(counters) and not any(isinstance(_replayed(one, bound, seen), str) for one in made)


def _counting(bound: Bound, code: LossCode, counters: tuple[str, ...], count: int) -> Bound:
    """Return how a batch gets its names where these counters stand at `count`. Attributes stay the script's own: what reads them is given the number."""
    names = [ast.parse(f"{name} = {count}").body[0] for name in counters if "." not in name]
    nodes = [node for one in (*code.statements, code.loss) for node in ast.walk(one)]
    reads = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)]
    in_place = {node: ast.Constant(count) for node in reads if ast.unparse(node) in counters}
    return replace(bound, begin=(*bound.begin, *names), in_place={**bound.in_place, **in_place})


def _given_a_number(statement: ast.stmt) -> set[str]:
    """Return the names that a loop's counter has: of `i, batch = (0, __batch__)`, i."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Tuple):
        return set()
    pairs = zip(getattr(statement.targets[0], "elts", ()), statement.value.elts, strict=False)
    return {one.id for one, value in pairs if isinstance(one, ast.Name) and isinstance(value, ast.Constant)}


def _twin(names: Iterable[str], place: Place, seen: Seen) -> str | None:
    shapes = [[p.shape for p in some] for some in seen.parameters.values()]
    own = {id(part) for parts in seen.parts.values() for part in parts}
    for name in sorted(names):
        value = place.get(name)
        if (
            isinstance(value, nn.Module)
            and id(unwrapped(value)) not in own
            and [p.shape for p in value.parameters()] in shapes
        ):
            return name
    return None


# The function, and whether it is right


@dataclass(frozen=True)
class _Made:
    text: str
    call: Callable[[Any], Tensor]
    module: ModuleType
    """Whose function it is."""


def _function(code: LossCode, place: Place, bound: Bound, resets: tuple[ast.stmt, ...] = ()) -> _Made:
    """Return the statements as a function of the batch; the other names stand for what they stood for. resets: those with which a batch
    begins."""
    kept, loss, _ = _batched(code, bound)
    roots = roots_of(code.inputs).union(*map(reads_of, (*bound.begin, *resets)))
    known = {name: place.local[name] for name in roots if name in place.local}
    known = {name: value for name, value in known.items() if not _of_this_batch(code, name, value)}
    nodes = (node for one in (*bound.begin, *kept) for node in ast.walk(one))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    again = [
        ast.parse(f"{name} = {_LATER}{name}").body[0]
        for name in sorted((roots & stored) - bound.names)
        if name in known
    ]
    body = [*again, *bound.begin, *resets, *kept, ast.Return(loss)]
    arguments = ast.arguments([], [ast.arg(BATCH)], None, [], [], None, [])
    function = ast.FunctionDef("loss_of_batch", arguments, copy.deepcopy(body), [], None)
    module = ast.fix_missing_locations(ast.Module([function], []))
    made = ModuleType(LOSS_MODULE)  # a module, as torch.compile looks for the globals of a function in one
    sys.modules[LOSS_MODULE] = made
    as_it_was = {f"{_LATER}{name}": value for name, value in known.items()}
    made.__dict__.update({WITH_BATCHES: with_batches} | place.global_ | known | as_it_was)
    made.__dict__["__name__"] = LOSS_MODULE
    # The script's own statements.
    exec(compile(module, f"<the loss of {place.file}>", "exec", dont_inherit=True), made.__dict__)
    return _Made(ast.unparse(function), made.__dict__["loss_of_batch"], made)


def _batched(code: LossCode, bound: Bound) -> tuple[list[ast.stmt], ast.expr, set[str]]:
    """Return the statements with the batch in them, the loss, and what these read. What was only needed to get the batch is left out, and
    what is left out is so with all around it: `try: batch = next(batches)`."""
    kept = [one for one in code.statements if not any(inner in bound.left_out for inner in ast.walk(one))]
    loss = _InPlace(bound.in_place).visit(code.loss)
    statements, read = needed([_InPlace(bound.in_place).visit(one) for one in kept], loss)
    return statements, loss, read


class _InPlace(ast.NodeTransformer):
    """Puts what it is given in the place of some nodes; all else is copied."""

    def __init__(self, nodes: Mapping[ast.expr, ast.expr]) -> None:
        self.nodes = nodes

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr) and node in self.nodes:
            return self.nodes[node]
        fields: dict[str, Any] = {
            name: [self.visit(one) if isinstance(one, ast.AST) else one for one in value]
            if isinstance(value, list)
            else self.visit(value)
            if isinstance(value, ast.AST)
            else value
            for name, value in ast.iter_fields(node)
        }
        return type(node)(**fields)


def _divided_by(code: LossCode, place: Place, bound: Bound, seen: Seen) -> int:
    """Return the micro-batches of a step if the statements divide the loss by so many, and else 1. It is tried: without that division, wherever it stands,
    the loss and the gradient are so many times what was seen."""
    count = max(1, seen.steps[-1].num_backwards)
    nodes = [node for one in (*code.statements, code.loss) for node in ast.walk(one)] if count > 1 else []
    divisors = [by for node in nodes if (by := _divisor(node, count, place)) is not None]
    for some in (*((one,) for one in divisors), *([tuple(divisors)] if len(divisors) > 1 else [])):
        in_place = {**bound.in_place, **dict.fromkeys(some, ast.Constant(1))}
        without = _function(code, place, replace(bound, in_place=in_place))
        if _replayed(without, bound, seen) == seen.backward.scaled_by / count:
            return count
    return 1


def _divisor(node: ast.AST, count: int, place: Place) -> ast.expr | None:
    """Return what stands for so many in a division by it, or for its inverse in a product."""
    match node:
        case ast.BinOp(op=ast.Div(), right=by) | ast.AugAssign(op=ast.Div(), value=by):
            wanted = count
        case ast.BinOp(op=ast.Mult(), right=by) | ast.AugAssign(op=ast.Mult(), value=by):
            wanted = 1 / count
        case _:
            return None
    value = value_of(by, place)
    return by if isinstance(value, int | float) and value == wanted else None


def _replayed(made: _Made, bound: Bound, seen: Seen) -> float | str:
    """Return by what the loss of the first batch was multiplied before backward, where a replay gives what was seen; else in what it
    differs."""
    told = list[str]()
    # A loader that fetches ahead draws after the batch that is trained on.
    states = (bound.random, seen.backward.random, *(one.random for one in seen.backward.fetched))
    for random in filter(None, states):
        try:
            with _on_copies(seen) as copies, torch.enable_grad():
                random.put_back()
                loss = made.call(copy.deepcopy(bound.seen))  # which they may change, as who normalizes in place
                loss.backward()
        except (Exception, Enough) as error:  # of the script's code, which may fetch another batch
            told.append(f"its statements raised {type(error).__name__}: {error}")
            continue
        reasons = {factor: _far(loss, copies, seen, factor) for factor in _factors(seen)}
        if (factor := next((one for one, reason in reasons.items() if reason is None), None)) is not None:
            return factor
        told.append(next(filter(None, reasons.values())))
    return told[0]


def _factors(seen: Seen) -> list[float]:
    """Return by what the statements' loss may have been multiplied before backward: a GradScaler's factor, and one divided by the number of
    micro-batches, as accelerate does."""
    counts = (1, *(max(1, one.num_backwards) for one in seen.steps))  # the first step of some comes too early
    return [seen.backward.scaled_by / one for one in dict.fromkeys(counts)]


def _far(loss: Tensor, copies: Copies, seen: Seen, scale: float) -> str | None:
    ours, theirs = float(loss.detach()) * scale, seen.backward.value
    if not math.isclose(ours, theirs, rel_tol=SAME, abs_tol=SAME * 1e-3):
        return f"replayed, its statements give the loss {ours:.6g}, and {theirs:.6g} was seen"
    off = far = 0.0
    for own, again in copies.of_parameters(seen):
        zero = torch.zeros((), device=own.device)
        wanted = seen.backward.gradients.get(id(own), zero)
        had = zero if again.grad is None else again.grad * scale
        off += float((had - wanted).double().square().sum())
        far += float(wanted.double().square().sum())
    if math.sqrt(off) > SAME * math.sqrt(far) * 10:
        return f"replayed, its statements give a gradient that is off by {math.sqrt(off / far) if far else math.inf:.2g} of the one that was seen"
    return None
