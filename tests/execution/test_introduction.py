"""A rank asks for no trial before the Dispatcher knows its process: by what was counted then, a kill is judged."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import ray

from batchscout.orchestrator.execution.ranks import Place

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@ray.remote(num_cpus=0)
class Busy:
    """A Dispatcher that answers when it is told to."""

    def __init__(self) -> None:
        self.was_asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def introduce(self, *_: object) -> None:
        self.was_asked.set()
        await self.may_answer.wait()

    async def until_asked(self) -> None:
        await self.was_asked.wait()

    async def answer(self) -> None:
        self.may_answer.set()


def test_a_rank_waits_until_its_process_is_known() -> None:
    dispatcher: Any = Busy.remote()
    introduction = threading.Thread(target=Place(dispatcher, "lane", 0).introduce)
    introduction.start()
    ray.get(dispatcher.until_asked.remote())
    introduction.join(1.0)
    assert introduction.is_alive(), "it did not wait for the answer"
    ray.get(dispatcher.answer.remote())
    introduction.join(60.0)
    assert not introduction.is_alive()
