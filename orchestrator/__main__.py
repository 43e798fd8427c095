"""`python -m orchestrator` is the program `batchscout`."""

from orchestrator.cli import program

program()
