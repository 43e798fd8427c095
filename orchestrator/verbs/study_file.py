"""The study file that was typed, and the directory that its study runs in."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.terminal import printable

if TYPE_CHECKING:
    from orchestrator.config.keys import StudyConfig


def config_of(arguments: argparse.Namespace) -> StudyConfig:
    from orchestrator.config.load import load_study

    def say(told: str) -> None:
        print(f"batchscout: {printable(told)}", file=sys.stderr)

    return load_study(arguments.study, arguments.set, say)


def run_dir_of(arguments: argparse.Namespace, config: StudyConfig) -> Path:
    return (arguments.dir or Path("runs") / config.name).absolute()
