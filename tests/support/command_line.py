"""The program as it is typed, in the test's own process."""

from __future__ import annotations

from collections.abc import Callable

Typed = Callable[..., tuple[int, str, str]]
"""(exit code, stdout, stderr) of `batchscout` with these arguments: the fixture `typed`"""
