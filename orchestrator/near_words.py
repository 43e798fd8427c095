"""Which word was meant by one that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

OTHER_WORDS = {
    "huggingface": "hf",
    "transformers": "hf",
    "pytorch": "torch",
    "resume": "run",
    "continue": "run",
    "start": "run",
    "watch": "status --watch",
    "results": "status",
    "help": "--help",
    **dict.fromkeys(("--out", "--output", "--output-dir"), "--dir"),
    "--format": "--to",
    "show": "status",
    "new": "init",
}
"""Words that people type, and ours that they mean."""


def instead(word: str, known: Sequence[str]) -> str:
    """Return which of the words that are known was meant, and all of them."""
    meant = OTHER_WORDS.get(word.lower(), "")
    is_there = meant.partition(" ")[0] in [*known, "--help"]
    near = [meant] if is_there else difflib.get_close_matches(word.lower(), known, n=1)
    meant = f"did you mean {near[0]}? There are " if near else "there are "
    return meant + ", ".join(known)
