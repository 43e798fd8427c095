"""What an object that trains elsewhere says of a study, read in a process of its own. Loads no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from batchscout.trainers.before.own_process import own_process
from batchscout.trainers.errors import SourceFault
from batchscout.trainers.sources.settings import Settings

OTHER_END = "batchscout.trainers.before.read_source"
Library = Literal["lightning", "transformers"]


@dataclass(frozen=True)
class Source:
    """Where an object comes from."""

    library: Library
    target: str
    """The callable that makes it, as `package.module:callable`."""
    kwargs: Mapping[str, Any]
    num_targets: str | None = None
    """What its loss is a mean over, as `over` of `loss: mean` has it; None where that is to be found out."""


def read_source(source: Source) -> Settings:
    """Make the object and read it. Raises SourceFault, in the user's words, where it cannot be made or cannot be honoured."""
    with own_process(OTHER_END, asdict(source), [os.getcwd(), *sys.path]) as process:
        answer = next(process.answers(), {})
        if "keys" in answer:
            return Settings(answer["keys"], tuple(answer["told"]), answer["run_samples"])
        fault = answer.get("fault")
        if fault is None:
            last_words = "\n".join(process.last_words().strip().splitlines()[-5:])
            fault = f"its process ended with exit code {process.exit_code()}: {last_words}"
    raise SourceFault(f"from.{source.library} {source.target}: {fault}")
