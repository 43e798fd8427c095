"""What tells one script from another: the code that a model is made of, and not the lines around it."""

from __future__ import annotations

import linecache
from types import ModuleType
from typing import Any

import pytest

from batchscout.trainers.sources.contents import contents

SCRIPT = """
import functools
from torch import nn

width, depth = 8, 2

class Block(nn.Module):
    def forward(self, x):
        return helper(x)

def helper(x):
    return x * 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(width, 1)

def sized(n):
    return lambda: (Net(), n)

model, made, part = Net, sized(3), functools.partial(sized, 5)
"""


def script(text: str, name: str) -> Any:
    """A module of this text, whose source Python finds as it finds that of a cell."""
    file = f"<{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    module = ModuleType("script")
    exec(compile(text, file, "exec"), vars(module))
    return module


def text_of(code: Any) -> list[str | bytes]:
    return list(contents(code))


@pytest.mark.parametrize("what", ["model", "made", "part"])
@pytest.mark.parametrize(
    ("old", "new"),
    [("x * 2", "x * 3"), ("width, depth = 8, 2", "width, depth = 8, 8"), ("return helper(x)", "return -helper(x)")],
)
def test_what_the_code_refers_to_tells_it_apart(what: str, old: str, new: str) -> None:
    before, after = script(SCRIPT, "before"), script(SCRIPT.replace(old, new), "after")
    assert text_of(getattr(before, what)) != text_of(getattr(after, what))


@pytest.mark.parametrize("what", ["model", "made", "part"])
def test_the_lines_around_it_do_not(what: str) -> None:
    before, after = script(SCRIPT, "before"), script("\n\nprint\n" + SCRIPT + "\nother = 3\n", "after")
    assert text_of(getattr(before, what)) == text_of(getattr(after, what))


def test_what_a_function_has_enclosed_counts() -> None:
    one = script(SCRIPT, "one")
    assert text_of(one.sized(3)) != text_of(one.sized(4))
