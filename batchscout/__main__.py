"""`python -m batchscout` is the program `batchscout`."""

from batchscout.orchestrator.cli import program

program()
