"""`python -m batchscout` is the program `batchscout`."""

import sys

if not sys.flags.safe_path:
    sys.path.pop(0)  # the current directory: a token.py there would end the program before it could say so

from batchscout.orchestrator.cli import program

program()
