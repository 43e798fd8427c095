"""Storage that fails for real: calls of a process into its file system are interposed, and fail with a chosen error."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

Call = Literal["rename", "open", "fsync", "write", "unlink", "list", "lock"]


@cache
def interposed_library(name: str = "storage_faults") -> Path:
    """The library built from the C file of that name beside this one, once per session."""
    library = Path(tempfile.mkdtemp()) / f"{name}.so"
    source = Path(__file__).with_name(f"{name}.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def on_failing_storage(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) in a process of its own, in which `failing` works."""
    from tests.support.tiny import in_fresh_process  # here, because torch comes with it

    return in_fresh_process(function, *args, LD_PRELOAD=str(interposed_library()))


def fault(call: Call, path: str, error: str, times: int | None = None, after: int = 0) -> dict[str, str]:
    """The environment in which this call fails on paths that contain `path`, after so many calls that do not; times: how
    often, None: always."""
    said = {
        "FAULT_CALL": call,
        "FAULT_PATH": path,
        "FAULT_ERRNO": str(getattr(errno, error)),
        "FAULT_AFTER": str(after),
    }
    return said if times is None else said | {"FAULT_TIMES": str(times)}


@contextlib.contextmanager
def failing(call: Call, path: str, error: str, times: int | None = None) -> Iterator[None]:
    """Have the call fail in this process, which `on_failing_storage` has started."""
    assert "LD_PRELOAD" in os.environ, "nothing would fail in this process"
    os.environ.update(fault(call, path, error, times))
    try:
        yield
    finally:
        for name in ("FAULT_CALL", "FAULT_PATH", "FAULT_ERRNO", "FAULT_TIMES", "FAULT_AFTER"):
            os.environ.pop(name, None)
