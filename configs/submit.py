"""`ray submit cluster.yaml configs/submit.py configs/quickstart.yaml` copies this one file to the head's home and runs it
there. It runs the study, a path inside the clone that cluster.yaml installed, on the whole cluster; what follows the path is
an option of `batchscout run`.
"""

import os
import sys
from pathlib import Path

CLONE = Path.home() / "batchscout"  # file_mounts and setup_commands of cluster.yaml


def checked(arguments: list[str]) -> list[str]:
    """Return the study's path and the options of `batchscout run`. Raises ValueError where the path is none inside the clone."""
    path, *options = arguments or [""]
    if not path or path.startswith("-") or not all(option.startswith("-") for option in options[:1]):
        raise ValueError(
            f"submit.py takes one study path and then options of `batchscout run`, but was given {arguments}; ray submit has "
            "a shell read what it is given, which splits it at spaces: batchscout launch ray STUDY.yaml does not"
        )
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ValueError(f"'{path}' is not a path inside {CLONE}; give one as configs/quickstart.yaml")
    if not (CLONE / path).is_file():
        raise ValueError(
            f"there is no study {path} in {CLONE} on the head; put it in your clone and run ray rsync-up cluster.yaml ./ "
            "'~/batchscout/', or check the path, which is relative to the clone"
        )
    return arguments


def main(arguments: list[str]) -> None:
    """`batchscout run STUDY --address auto` in the clone; bad input ends with exit code 2 and one message."""
    try:
        study = checked(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    os.chdir(CLONE)
    from batchscout.orchestrator.cli import main as batchscout

    batchscout(["run", *study, "--address", "auto"])


if __name__ == "__main__":
    main(sys.argv[1:])
