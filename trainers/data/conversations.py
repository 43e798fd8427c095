"""Conversations from files, and how they become text in which it is known what the assistant wrote."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from batchscout.trainers.data.cache import hash_of, hash_of_file
from batchscout.trainers.data.corpus import hf_splits, matching_files

Piece = tuple[str, bool]
"""A part of a text, and whether it is to be learnt: what the assistant wrote."""
Message = Mapping[str, Any]
Turn = tuple[Message, bool]
"""A message, and whether it is to be learnt."""
END = "<|end|>"
PLAIN_TOKENS = (*(f"<|{role}|>" for role in ("system", "user", "assistant", "tool")), END)
"""Those of the plain template."""
_FORMS = 'give it `messages`, a list of {"role": ..., "content": ...}, or `prompt` and `completion`'


@dataclass(frozen=True)
class Row:
    where: str
    """The file and line, or the number in a data set, in words."""
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Rows:
    """Rows, which are read only when they are needed, and a hash of all that is in them."""

    content_hash: str
    read: Callable[[], Iterator[Row]]


def rows_of(field: str, names: str | list[str]) -> dict[str, Rows]:
    """Return what data.kwargs.<field> names by splits: JSON-lines files are `train` alone, a folder that save_to_disk has written has
    its own. Raises ValueError where there is nothing to read."""
    if is_folder(names):
        return {split: _of_set(f"{names}, {split}", found.samples) for split, found in hf_splits(field, names).items()}
    paths = matching_files(field, names)
    return {"train": Rows(hash_of(map(hash_of_file, paths)), lambda: itertools.chain.from_iterable(map(_lines, paths)))}


def is_folder(names: str | list[str]) -> TypeGuard[str]:
    return isinstance(names, str) and Path(names).is_dir()


def _of_set(where: str, samples: Any) -> Rows:
    def read() -> Iterator[Row]:
        for number, values in enumerate(samples):
            yield Row(f"{where}, row {number}", values)

    return Rows(hash_of([samples._fingerprint.encode()]), read)


def _lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                values = json.loads(line)
            except ValueError as error:  # a JSONDecodeError, or bytes that are no UTF-8
                raise ValueError(f"{where}, is no JSON ({error}); write one JSON object a line") from error
            if not isinstance(values, dict):
                raise ValueError(f"{where}, holds a {type(values).__name__}, not an object; {_FORMS}")
            yield Row(where, values)


@dataclass(frozen=True)
class Template:
    """How messages become text."""

    pieces: Callable[[list[Turn]], list[Piece]]
    end: str
    """What ends a completion that is plain text."""


def pieces_of(row: Row, template: Template) -> list[Piece]:
    """Return a row as text. Raises ValueError where it is no conversation, or the assistant says nothing in it."""
    prompt, completion = row.values.get("prompt"), row.values.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return [(prompt, False), (completion + template.end, True)]
    turns = _turns(row)
    if not any(learnt for _, learnt in turns):
        raise ValueError(f"{row.where}, has no message of the assistant, so nothing to learn; leave it out")
    try:
        return template.pieces(turns)
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from error


def _turns(row: Row) -> list[Turn]:
    values = row.values
    if isinstance(values.get("messages"), list):
        parts = [(values["messages"], True)]
    elif isinstance(values.get("prompt"), list) and isinstance(values.get("completion"), list):
        parts = [(values["prompt"], False), (values["completion"], True)]
    else:
        raise ValueError(f"{row.where}, has {', '.join(values) or 'nothing'}, which is no conversation; {_FORMS}")
    turns = []
    for message, learnt in ((message, learnt) for messages, learnt in parts for message in messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{row.where}, has a message without a role; {_FORMS}")
        turns.append((message, learnt and message["role"] == "assistant"))
    return turns


def plain(turns: list[Turn]) -> list[Piece]:
    """Write each message as <|role|>content<|end|>. The assistant writes its content, and the end."""
    pieces: list[Piece] = []
    for message, learnt in turns:
        content = message.get("content")
        if not isinstance(content, str):
            raise ValueError(
                f"a message of the {message['role']} has a {type(content).__name__} as its content, and the plain template takes text "
                "alone; use a tokenizer that has a chat template"
            )
        pieces += [(f"<|{message['role']}|>", False), (content + END, learnt)]
    return pieces


def by_template(render: Callable[..., str], turns: list[Turn]) -> list[Piece]:
    """Return the messages as a tokenizer's own template writes them.

    render: its apply_chat_template without tokenising. What the assistant wrote is what a message adds to the text that asks for it,
    up to white space after its end. Raises ValueError where the template writes earlier messages otherwise once there are later ones.
    """
    messages = [dict(message) for message, _ in turns]
    whole, at = render(messages), 0
    pieces: list[Piece] = []
    for number, (_, learnt) in enumerate(turns):
        if not learnt:
            continue
        asked, answered = render(messages[:number], add_generation_prompt=True), render(messages[: number + 1])
        if not (whole.startswith(answered) and answered.startswith(asked)):
            raise ValueError(
                f"the tokenizer's chat template writes message {number + 1} otherwise once there are others, so that it cannot be told "
                "what the assistant wrote; split the conversation so that each ends with the message to learn (prompt and completion)"
            )
        end = len(answered.rstrip())
        pieces += [(whole[at : len(asked)], False), (whole[len(asked) : end], True)]
        at = end
    return [*pieces, (whole[at:], False)]


def texts_of(pieces: Iterable[Piece]) -> str:
    return "".join(text for text, _ in pieces)
