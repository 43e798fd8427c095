"""`ray submit cluster.yaml configs/submit.py configs/quickstart.yaml` copies this one file to the head's home and runs it
there. It runs the study, a path inside the clone that cluster.yaml installed, on the whole cluster.
"""

import os
import re
import sys
from pathlib import Path

CLONE = Path.home() / "batchscout"  # file_mounts and setup_commands of cluster.yaml


def study_path(arguments: list[str]) -> str:
    """The one study path. Raises ValueError for anything else: `ray submit` hands arguments to a shell unquoted."""
    if len(arguments) != 1:
        raise ValueError(
            f"submit.py takes one study path, but was given {len(arguments)}: {arguments}; "
            "ray submit splits at spaces, so rename a path that has any"
        )
    (path,) = arguments
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_./-]*", path):
        raise ValueError(
            f"'{path}' is not a path inside {CLONE}; use letters, digits and _ . - / only, as in configs/quickstart.yaml"
        )
    if not (CLONE / path).is_file():
        raise ValueError(
            f"there is no study {path} in {CLONE} on the head; put it in your clone and `ray rsync-up cluster.yaml` it, "
            "or check the path, which is relative to the clone"
        )
    return path


def main(arguments: list[str]) -> None:
    """`batchscout run STUDY --address auto` in the clone; bad input ends with exit code 2 and one message."""
    try:
        path = study_path(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    os.chdir(CLONE)
    from orchestrator.cli import main as batchscout

    batchscout(["run", path, "--address", "auto"])


if __name__ == "__main__":
    main(sys.argv[1:])
