"""Tokenizers of conversations: a template, and from its text to tokens of which it is known whether they are to be learnt."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from batchscout.trainers.data.cache import hash_of, hash_of_file
from batchscout.trainers.data.conversations import (
    END,
    PLAIN_TOKENS,
    Piece,
    Row,
    Template,
    Turn,
    by_template,
    pieces_of,
    plain,
    texts_of,
)
from batchscout.trainers.data.tokenizers import (
    TokenizerSpec,
    loaded_tokenizer,
    of_whole_texts,
    tokenizer_identity,
    trained_bpe,
)

_OF_A_TOKENIZER = (".json", ".jinja", ".txt", ".model")
"""The files of a transformers folder that may say what its tokenizer does."""
PLAIN = Template(plain, END)


@dataclass(frozen=True)
class ChatTokenizer:
    template: Template
    encode: Callable[[list[Piece]], tuple[np.ndarray, np.ndarray]]
    """Returns (the tokens, which of them are to be learnt)."""
    vocab_size: int


def chat_tokenizer_identity(spec: TokenizerSpec) -> str:
    """Return a text that differs where tokens or template would. Raises ValueError where `data.kwargs.tokenizer` is no valid choice."""
    if isinstance(spec, str) and Path(spec).is_dir():
        files = sorted(path for path in Path(spec).iterdir() if path.suffix in _OF_A_TOKENIZER)
        return f"folder {hash_of(part for path in files for part in (path.name.encode(), hash_of_file(path)))}"
    return tokenizer_identity(spec)


def chat_tokenizer_of(spec: TokenizerSpec, rows: Callable[[], Iterator[Row]], directory: Path) -> ChatTokenizer:
    """Return the tokenizer that the study file names. One that is trained on the rows is saved as tokenizer.json."""
    if spec == "bytes":
        return ChatTokenizer(PLAIN, functools.partial(_joined, lambda text: list(text.encode())), 256)
    if isinstance(spec, str) and not Path(spec).is_file():
        return _of_transformers(spec)
    if isinstance(spec, str):
        return _of(loaded_tokenizer(spec), PLAIN)
    from datasets import Dataset

    texts = Dataset.from_dict({"text": [texts_of(pieces_of(row, PLAIN)) for row in rows()]})
    tokenizer = trained_bpe(spec["train_bpe"], texts, PLAIN_TOKENS)
    tokenizer.save(str(directory / "tokenizer.json"))
    return _of(tokenizer, PLAIN)


def _of_transformers(spec: str) -> ChatTokenizer:
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise ValueError(
            f"data.kwargs.tokenizer '{spec}' needs transformers; pip install 'batchscout[hf]', or name a tokenizer.json"
        ) from error
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(spec)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data.kwargs.tokenizer '{spec}' could not be loaded: {error}; give a folder that save_pretrained has written, or "
            "train one on the data with tokenizer: {train_bpe: 8192}"
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"data.kwargs.tokenizer '{spec}' has no tokenizer.json, by which it is known which text a token stands for; save it with one"
        )
    template = PLAIN if tokenizer.chat_template is None else _own_template(tokenizer)
    return _of(of_whole_texts(tokenizer.backend_tokenizer), template)


def _own_template(tokenizer: Any) -> Template:
    from jinja2 import TemplateError

    def render(messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    def pieces(turns: list[Turn]) -> list[Piece]:
        try:
            return by_template(render, turns)
        except TemplateError as error:
            raise ValueError(f"the tokenizer's chat template refuses it: {error}") from error

    return Template(pieces, tokenizer.eos_token or "")


def _of(tokenizer: Any, template: Template) -> ChatTokenizer:
    def whole(pieces: list[Piece]) -> tuple[np.ndarray, np.ndarray]:
        """Read the text as one, as the template's own tokens keep its parts apart. A token is of the part in which it begins."""
        encoding = tokenizer.encode(texts_of(pieces), add_special_tokens=False)
        ends = np.cumsum([len(text) for text, _ in pieces])
        begins = np.array([begin for begin, _ in encoding.offsets], np.int64)
        of_piece = np.minimum(np.searchsorted(ends, begins, side="right"), len(pieces) - 1)
        return np.array(encoding.ids, np.int64), np.array([learnt for _, learnt in pieces])[of_piece]

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    # The plain marks may be no tokens of this one, and grow into what is beside them.
    one_by_one = functools.partial(_joined, ids)
    return ChatTokenizer(template, one_by_one if template is PLAIN else whole, 1 + max(tokenizer.get_vocab().values()))


def _joined(ids: Callable[[str], Sequence[int]], pieces: list[Piece]) -> tuple[np.ndarray, np.ndarray]:
    """Read each part by itself."""
    parts = [(np.array(ids(text), np.int64), learnt) for text, learnt in pieces]
    learnt = [np.full(len(tokens), learnt) for tokens, learnt in parts]
    return np.concatenate([tokens for tokens, _ in parts]), np.concatenate(learnt)
