"""Two ranks of a gloo group, in processes that serve one test after the other: starting them costs more than most
tests."""

from __future__ import annotations

import atexit
import io
import multiprocessing
import traceback
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD_SIZE = 2


class _Pair:
    """Both processes, and the pipes to them."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, question: tuple[Any, ...]) -> list[Any]:
        """Return the answer of each rank. Raises AssertionError as soon as one fails: the other may wait for it for
        ever."""
        for pipe in self.pipes:
            pipe.send(question)
        answers: dict[int, Any] = {}
        while len(answers) < WORLD_SIZE:
            for pipe in wait([pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]):
                assert isinstance(pipe, Connection)
                rank = self.pipes.index(pipe)
                try:
                    fault, result = pipe.recv()
                except EOFError:
                    fault, result = "its process died", b""
                assert fault is None, f"rank {rank}: {fault}"
                answers[rank] = torch.load(io.BytesIO(result), weights_only=False)
        return [answers[rank] for rank in range(WORLD_SIZE)]

    def end(self) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            pipe.close()
            process.kill()
            process.join()


_pairs: list[_Pair] = []


def on_two_ranks(function: Callable[..., Any], directory: Path, *args: Any) -> list[Any]:
    """Return [what function(*args) returns on rank 0, on rank 1]; the ranks meet through a file in `directory`.

    What a function changes in its process, such as a module's constant, it must put back.
    """
    if not _pairs:
        _pairs.append(_Pair())
    try:
        return _pairs[0].ask((function, f"{directory}/store-{uuid.uuid4().hex}", args))
    except BaseException:
        _end_pair()
        raise


@atexit.register
def _end_pair() -> None:
    while _pairs:
        _pairs.pop().end()


def _serve(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, store, args = pipe.recv()
        except EOFError:  # the session is over
            return
        try:
            pipe.send((None, _of_rank(rank, function, store, args)))
        except BaseException:
            pipe.send((traceback.format_exc(), b""))


def _of_rank(rank: int, function: Callable[..., Any], store: str, args: tuple[Any, ...]) -> bytes:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    try:
        result = io.BytesIO()
        torch.save(function(*args), result)
        dist.barrier()  # a rank that leaves early would break the connection under one that still talks
        return result.getvalue()
    finally:
        dist.destroy_process_group()
