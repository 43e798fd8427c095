"""The repeated blocks of a model: what is checkpointed, compiled and sharded one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

Container = nn.ModuleList | nn.Sequential


@dataclass(frozen=True)
class Block:
    """A place in a container, and so the module that stands there."""

    container: Container
    name: str

    @property
    def module(self) -> nn.Module:
        return self.container.get_submodule(self.name)

    def replace(self, module: nn.Module) -> None:
        setattr(self.container, self.name, module)


def find_blocks(model: nn.Module, names: str | Iterable[str] | None = None) -> list[Block]:
    """Return the repeated blocks in their order: the members of the containers that are named, else those that are found.

    What is found are the members of the longest ModuleList whose members are all of one class, and of all others with members of
    this class, as an encoder and a decoder may have them. Where there is none, stages of a convolutional network are: see
    `_of_sequentials`.
    """
    containers = _found(model) if names is None else _named(model, [names] if isinstance(names, str) else list(names))
    return [Block(one, name) for one in containers for name in one._modules]  # a module that stands there twice, too


def _found(model: nn.Module) -> list[Container]:
    uniform = [module for module in model.modules() if isinstance(module, nn.ModuleList) and _class_of(module)]
    if not uniform:
        return _of_sequentials(model)
    longest = max(uniform, key=len)
    if not _is_composite(longest):
        return [longest]
    inside = {id(inner) for member in longest for inner in member.modules()}
    return [one for one in uniform if _class_of(one) is _class_of(longest) and id(one) not in inside]


def _of_sequentials(model: nn.Module) -> list[Container]:
    """Return the Sequentials whose members are of the class that most blocks have, two at least. A block has layers inside; what
    is repeated within a block is none, but a Sequential in a Sequential is only a part of the list."""
    uniform = [one for one in _outermost(model) if _is_composite(one)]
    by_class: dict[type[nn.Module] | None, list[Container]] = {}
    for one in uniform:
        by_class.setdefault(_class_of(one), []).append(one)
    most = max(by_class.values(), key=lambda containers: sum(map(len, containers)), default=[])
    return most if sum(map(len, most)) > 1 else []


def _outermost(module: nn.Module) -> Iterator[nn.Sequential]:
    """Yield the Sequentials whose members are all of one class, and do not look for others inside of such members."""
    kind = _class_of(module) if isinstance(module, nn.Sequential) else None
    if isinstance(module, nn.Sequential) and kind:
        yield module
    if kind in (None, nn.Sequential):
        for child in module.children():
            yield from _outermost(child)


def _class_of(container: Container) -> type[nn.Module] | None:
    """Return the class of all members; None where there are several, or no member."""
    classes = {type(member) for member in container}
    return classes.pop() if len(classes) == 1 else None


def _is_composite(container: Container) -> bool:
    return all(any(True for _ in member.children()) for member in container)


def _named(model: nn.Module, names: list[str]) -> list[Container]:
    """Return the containers of these names. Raises ValueError where one is none, or lies in another."""
    there = {key: module for key, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)}
    for name in names:
        if name not in there:
            has = ", ".join(key for key in there if key) or "none"
            raise ValueError(
                f"model.blocks names '{name}', which is no ModuleList or Sequential of this model; it has: {has}"
            )
    for outer, inner in itertools.permutations(names, 2):
        if inner == outer or inner.startswith(f"{outer}."):
            raise ValueError(
                f"model.blocks names '{outer}' and '{inner}', which is a part of it; a layer is in one block: leave one of them out"
            )
    return [there[name] for name in names]
