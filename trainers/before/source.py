"""What an object that trains elsewhere says of a study, read in a process of its own. Loads no torch.

`python -m batchscout.trainers.before.read_source` is the other end of `read_source`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from batchscout.trainers.errors import SourceFault
from batchscout.trainers.sources.settings import Settings

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
    done = subprocess.run(
        [sys.executable, "-P", "-m", "batchscout.trainers.before.read_source"],
        input=json.dumps(asdict(source)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *map(os.path.abspath, sys.path)])},
        capture_output=True,
        text=True,
    )
    answer = json.loads(done.stdout) if done.stdout else {}
    if "keys" in answer:
        return Settings(answer["keys"], tuple(answer["told"]), answer["run_samples"])
    last_words = "\n".join(done.stderr.strip().splitlines()[-5:])
    crashed = f"its process ended with exit code {done.returncode}: {last_words}"
    raise SourceFault(f"from.{source.library} {source.target}: {answer.get('fault', crashed)}")
