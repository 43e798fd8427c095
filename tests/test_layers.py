"""A training run needs torch alone: what a user debugs has no Ray, no W&B and no study in it."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import trainers
from tests.tiny import in_fresh_process

FOREIGN = {"ray", "wandb", "orchestrator"}


def foreign_modules_after_importing(name: str) -> list[str]:
    importlib.import_module(name)
    return sorted(FOREIGN & sys.modules.keys())


def foreign_modules_after_importing_all() -> list[str]:
    for module in pkgutil.iter_modules(trainers.__path__, "trainers."):
        importlib.import_module(module.name)
    return sorted(FOREIGN & sys.modules.keys())


def test_the_training_loop_imports_no_orchestration():
    assert in_fresh_process(foreign_modules_after_importing, "trainers.loop") == []


def test_no_module_of_the_trainers_does():
    assert in_fresh_process(foreign_modules_after_importing_all) == []
