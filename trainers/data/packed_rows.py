"""Samples of uneven length, packed into rows of one length: several samples in a row, and little padding.

By best-fit decreasing: from the longest sample down, each goes into the row that it fills best, which needs at most 11/9 of the fewest rows
there can be, and 4 (Johnson et al. 1974, SIAM Journal on Computing 3, 299-325). A row is a sample to whoever trains on it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchscout.trainers.data.loaders import KEPT
from batchscout.trainers.data.padding import Padded, members_of
from batchscout.trainers.data.streams import tell_alike
from batchscout.trainers.errors import DataFault

MADE_ANEW = ("attention_mask", "position_ids")
"""What samples may have and rows have not: position_ids begin anew with each sample, and a mask of what is padding would say of other
samples that they are to be seen."""


class Packed:
    """A map-style set of rows: dictionaries with what data.pad names, and position_ids."""

    def __init__(self, samples: Padded, tokens: int) -> None:
        """Raises DataFault where a sample fits into no row."""
        lengths = np.asarray(samples.lengths)
        if len(lengths) and lengths.max() > tokens:
            raise DataFault(
                f"data.pack is {tokens}, and sample {int(lengths.argmax())} of {samples.where} has {int(lengths.max())} tokens; raise it to "
                f"{int(lengths.max())} at least, or shorten such samples"
            )
        self.samples, self.seq_len, self.rows = samples, tokens, packed(lengths, tokens)
        self.loader = samples.loader
        tell_alike(self, samples, [name for name in KEPT if name != "seq_len"])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        parts = self._parts(row)
        lengths = [len(next(iter(part.values()))) for part in parts]
        rest = self.seq_len - sum(lengths)
        joined = {
            name: torch.cat([*(part[name] for part in parts), parts[0][name].new_full((rest,), self.samples.pad[name])])
            for name in parts[0]
        }
        return joined | {"position_ids": torch.cat([torch.arange(length) for length in [*lengths, rest]])}

    def one_by_one(self, row: int) -> list[dict[str, Tensor]]:
        """Return the samples of a row, each a batch of its own."""
        return [{name: tensor[None] for name, tensor in part.items()} for part in self._parts(row)]

    def _parts(self, row: int) -> list[dict[str, Tensor]]:
        return [self._part(sample) for sample in self.samples.__getitems__(self.rows[row])]

    def _part(self, sample: Any) -> dict[str, Tensor]:
        """Return what of a sample goes into a row. Raises DataFault where that is not all of it."""
        if not isinstance(sample, dict):
            raise DataFault(
                f"data.pack makes rows with position_ids, and a sample of {self.samples.where} is a {type(sample).__name__}; let it be a "
                "dictionary"
            )
        if left := [name for name, _ in members_of(sample) if name not in (*self.samples.pad, *MADE_ANEW)]:
            raise DataFault(
                f"data.pack joins samples to rows, and data.pad does not name {', '.join(left)}; name it there with what fills up a row, or "
                "leave it out of the samples"
            )
        parts = {name: one for name, one in self.samples.padded_members(sample).items() if name not in MADE_ANEW}
        lengths = {name: len(one) for name, one in parts.items()}
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise DataFault(
                f"data.pack joins what belongs to the same tokens, and in a sample {said} of them; pad such samples, with data.pad alone"
            )
        return parts


def packed(lengths: np.ndarray, tokens: int) -> list[list[int]]:
    """Return the places of the samples in each row. lengths: none above `tokens`."""
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms = 0  # a bit for each room that a row has: the lowest one at or above a length is found at once
    for place in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[place])
        fitting = rooms >> length
        room = length + (fitting & -fitting).bit_length() - 1 if fitting else tokens
        if fitting:
            row = with_room[room].pop()
            rooms ^= 0 if with_room[room] else 1 << room
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(place)
        with_room.setdefault(room - length, []).append(row)
        rooms |= 1 << (room - length)
    return rows
