"""Which programs a script may start while it is watched: those that only tell something, compile, or help this Python's own processes. Pure."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

STARTS = ("subprocess.Popen", "os.posix_spawn", "os.exec")
# Programs that only tell something, and what all that they are asked must look like.
_TELLING = {
    **dict.fromkeys(("cat", "cd", "cut", "echo", "grep", "head", "ls", "lscpu", "nproc", "stty", "tail", "tr", "true", "uname", "wc", "which"), ".*"),
    "hostname": r"(-\S+)?",
    "ldconfig": r"-p|--print-cache",
    "nvidia-smi": r"( ?(topo -m|-[qLxidlh]|--(query|format|list|id|loop|help|version)\S*|[\w.,]+))*",
    "git": r"(?!.*--output)((-C|-c) \S+ |--\S+ )*(--version|rev-parse|log|status|describe|diff|show|rev-list|ls-files|cat-file|"
    r"branch --show-current|remote -v|remote get-url|config --(get|list)\S*)( .*)?",
}  # fmt: skip
COMPILER = re.compile(r"(\S+-)?(gcc|g\+\+|cc|c\+\+|clang|clang\+\+|nvcc|ptxas|ninja)(-[\d.]+)?")
_OF_MULTIPROCESSING = re.compile(r"\bmultiprocessing\.(resource_tracker|forkserver)\b")
# What torch.compile starts writes into its cache: compilers, and Pythons that compile or try what was compiled.
COMPILES = ("torch._inductor.", "torch.utils.cpp_extension", "triton.")


def what_it_starts(event: str, args: Sequence[Any]) -> list[str]:
    """Return the program that an audit event tells of, and what it is told; empty where it starts none."""
    if event == "os.system":
        return ["sh", "-c", os.fsdecode(args[0])]
    return [os.fsdecode(one) for one in (args[0], *args[1][1:])] if event in STARTS else []


def is_harmless(command: Sequence[str]) -> bool:
    """Return whether a program only tells something, compiles, or helps this Python's own processes."""
    return all(_is_harmless(*one) for one in programs_in(command))


def programs_in(command: Sequence[str]) -> list[list[str]]:
    """Return the programs of a shell's line, each with what it is told; the command itself where it is none, or does more than start them."""
    if os.path.basename(command[0]) not in ("sh", "bash", "dash") or command[1:2] != ["-c"] or len(command) < 3:
        return [list(command)]
    line = re.sub(r"[12&]?> */dev/null|2>&1", " ", command[2])
    with contextlib.suppress(ValueError):  # a quote is open
        programs = [shlex.split(part) for part in re.split(r"&&|\|\||[|;&\n]", line)]
        if not re.search(r"[<>`$(){}]", line) and any(programs):
            return [program for program in programs if program]
    return [list(command)]


def _is_harmless(program: str, *told: str) -> bool:
    name, words = os.path.basename(program), " ".join(told)
    if name.startswith("python") or program == sys.executable:
        return bool(_OF_MULTIPROCESSING.search(words))
    return bool(COMPILER.fullmatch(name)) or re.fullmatch(_TELLING.get(name, "(?!)"), words, re.DOTALL) is not None
