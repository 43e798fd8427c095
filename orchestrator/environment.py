"""What in the environment that the program is launched in would break a study. `run` refuses to start for it, and `doctor` tells of it.

Loads neither Ray nor torch: some of it is in the way of their import.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from batchscout.trainers.launcher import without_launcher

HARMLESS = {
    "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "PYTHONHASHSEED", "PYTHONIOENCODING", "PYTHONUNBUFFERED", "PYTHONUTF8",
}  # fmt: skip
"""Settings of Python that are set in many places, and change nothing that Ray or torch depends on."""


@dataclass(frozen=True)
class Environment:
    """What of it matters to a study."""

    variables: Mapping[str, str]
    optimize: int = 0
    """Python's -O, as a number: 1 leaves out asserts, 2 docstrings, too."""
    warning_options: Sequence[str] = ()
    """Python's -W and PYTHONWARNINGS, one each: action:message:category:module:line."""
    interfaces: Sequence[str] = ()
    """The network interfaces of this machine."""
    has_home: bool = True
    """False where neither HOME nor the machine's list of users says where this user's home is."""


@dataclass(frozen=True)
class Obstacle:
    """A part of the environment with which no study runs."""

    finding: str
    remedy: str


def observed_environment() -> Environment:
    interfaces = tuple(name for _, name in socket.if_nameindex())
    has_home = not os.path.expanduser("~").startswith("~")
    return Environment(dict(os.environ), sys.flags.optimize, tuple(sys.warnoptions), interfaces, has_home)


def obstacles(found: Environment, num_ranks: int = 1, *, on_gpu: bool = False) -> Iterator[Obstacle]:
    """Yield what would break a study on this machine. num_ranks: those of one trial; several have to reach each other."""
    train = found.variables.get("RAY_TRAIN_V2_ENABLED")
    if train is not None and train.lower() not in ("1", "true"):  # as Ray reads it
        yield Obstacle(
            f"RAY_TRAIN_V2_ENABLED is {train!r}, and batchscout runs on the second version of Ray Train, which that turns off",
            "unset RAY_TRAIN_V2_ENABLED",
        )
    if found.optimize >= 2:
        yield Obstacle(
            "Python leaves out docstrings (PYTHONOPTIMIZE is 2, or it was started with -OO), and Ray reads its own when it is imported",
            "unset PYTHONOPTIMIZE, or set it to 1",
        )
    if of_all_modules := [option for option in found.warning_options if _is_error_everywhere(option)]:
        yield Obstacle(
            f"Python makes an error of every warning ({', '.join(of_all_modules)} in PYTHONWARNINGS, or with -W), and Ray's servers end by "
            "those of their own libraries",
            "unset PYTHONWARNINGS, or name your own module in it (error:::my_module)",
        )
    if not found.has_home:
        yield Obstacle(
            f"HOME is not set, and /etc/passwd has no user {os.getuid()}: Ray looks for a home when it is imported",
            "set HOME to a folder that this user may write (export HOME=/tmp/home)",
        )
    if num_ranks > 1:
        yield from _interfaces(found, on_gpu=on_gpu)


def _is_error_everywhere(option: str) -> bool:
    action, message, _, module, _ = (*option.split(":"), "", "", "", "")[:5]
    return action != "" and "error".startswith(action) and not message and not module


def _interfaces(found: Environment, *, on_gpu: bool) -> Iterator[Obstacle]:
    """Yield what is wrong with the network interface that the ranks are told to use. gloo wants every name to be there, NCCL one that begins
    with a name, or after = is that name; after ^ it uses all others."""
    variable = "NCCL_SOCKET_IFNAME" if on_gpu else "GLOO_SOCKET_IFNAME"
    value = found.variables.get(variable, "")
    if not value or value.startswith("^"):
        return
    names, is_whole = value.removeprefix("=").split(","), not on_gpu or value.startswith("=")
    missing = [
        name for name in names if not any(one == name if is_whole else one.startswith(name) for one in found.interfaces)
    ]
    if missing == names if on_gpu else missing:
        yield Obstacle(
            f"{variable} is {value}, and this machine has no network interface {' or '.join(missing)}, by which the ranks could reach each "
            f"other; it has {', '.join(found.interfaces)}",
            f"unset {variable}, or name one that is there",
        )


def refuse_obstacles(num_ranks: int = 1, *, on_gpu: bool = False) -> None:
    """Raise ValueError where a study on this machine would break. See `obstacles`."""
    found = [f"{one.finding}; {one.remedy}" for one in obstacles(observed_environment(), num_ranks, on_gpu=on_gpu)]
    if found:
        raise ValueError("\n".join(found))


@contextlib.contextmanager
def fit_environment() -> Iterator[None]:
    """Within this a study can run: nothing is in its way, and what a launcher has left is put aside. To be entered before Ray or torch is
    imported. Raises ValueError where either would break, or is of a version that batchscout does not run with."""
    from batchscout.orchestrator.installed import refuse_other_versions  # here: `--help` need not load it

    refuse_obstacles()
    refuse_other_versions()
    with without_launcher() as names:
        if names:
            print(f"batchscout: {launcher_text(names)}", file=sys.stderr, flush=True)
        yield


def launcher_text(names: Sequence[str]) -> str:
    return f"not used are {', '.join(names)}, by which a launcher tells its ranks who they are: a study has ranks of its own"


def settings_to_suspect(variables: Mapping[str, str]) -> str:
    """Return, for whoever sees Ray or torch fail without a cause, which settings of theirs and Python's the environment has; empty where
    there are none."""
    told = ("PYTHON", "RAY_", "TORCH")
    found = sorted(name for name in variables if name.startswith(told) and name not in HARMLESS)
    return f"the environment has {', '.join(found)}: try it without" if found else ""
