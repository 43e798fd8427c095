"""What an object that trains elsewhere says of a study, read in a process of its own. Loads no torch."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from batchscout.trainers.before.own_process import own_process
from batchscout.trainers.errors import LossNotSeen, NoStudy, NotInTime, SourceFault
from batchscout.trainers.sources.settings import Settings
from batchscout.trainers.user_code import SCRIPT

_KINDS = {kind.__name__: kind for kind in (NoStudy, LossNotSeen)}
OTHER_END = "batchscout.trainers.before.read_source"
LONGEST_SECONDS = 600.0
"""Until an object has been made, or a script has come to its second optimizer step."""
Library = Literal["lightning", "transformers", "script"]


@dataclass(frozen=True)
class Source:
    """Where an object comes from."""

    library: Library
    target: str
    """The callable that makes it, as `package.module:callable`; of a script its file or module."""
    kwargs: Mapping[str, Any]
    num_targets: str | None = None
    """What its loss is a mean over, as `over` of `loss: mean` has it; None where that is to be found out."""
    is_timed: bool = False
    """Whether passes are timed, too."""

    @property
    def made_by(self) -> tuple[str, dict[str, Any]]:
        """The callable that makes the object in every run, and its arguments."""
        if self.library == "script":
            return SCRIPT, {"script": self.target, **self.kwargs}
        return self.target, dict(self.kwargs)


def read_source(source: Source) -> Settings:
    """Make the object and read it. Raises SourceFault, in the user's words, where it cannot be made or cannot be honoured, and NoStudy
    where no way to write it would help."""
    with own_process(OTHER_END, asdict(source), [os.getcwd(), *sys.path]) as process:
        watch = threading.Timer(LONGEST_SECONDS, process.end)
        watch.daemon = True
        watch.start()
        answer = next(process.answers(), {})
        is_late = not watch.is_alive()
        watch.cancel()
        if "keys" in answer:
            answer |= {name: tuple(answer[name]) for name in ("told", "taken")}
            return Settings(**answer)
        fault, kind = answer.get("fault"), _KINDS.get(answer.get("kind", ""), SourceFault)
        if is_late:
            kind = NotInTime
            fault = (
                f"it was not done after {LONGEST_SECONDS:.0f} s; let it come to its second optimizer step sooner, with fewer data or a smaller "
                "model, or write what it trains as package.module:callable (docs/own_model.md)"
            )
        elif fault is None:
            last_words = "\n".join(process.last_words().strip().splitlines()[-5:])
            fault = f"its process ended with exit code {process.exit_code()}: {last_words}"
    raise kind(f"from.{source.library} {source.target}: {fault}")
