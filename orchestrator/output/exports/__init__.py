"""A recommendation as another trainer's configuration: text to paste, and what that trainer cannot do. A file a trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.near_words import instead
from batchscout.orchestrator.output.answer import RUN_DIR, with_run_dir
from batchscout.orchestrator.output.exports import (
    accelerate,
    axolotl,
    deepspeed,
    hf,
    lightning,
    nanogpt,
    script,
    torch,
    torchtitan,
    trl,
)
from batchscout.orchestrator.output.exports.counted import as_long_as_the_real_run
from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.trainers.criteria import TransformersLoss
from batchscout.trainers.sources.settings import OwnRun
from batchscout.trainers.user_code import SCRIPT

WRITERS: dict[str, Callable[[Recommendation], str]] = {
    "script": script.written,
    "torch": torch.written,
    "hf": hf.written,
    "accelerate": accelerate.written,
    "lightning": lightning.written,
    "trl": trl.written,
    "axolotl": axolotl.written,
    "torchtitan": torchtitan.written,
    "deepspeed": deepspeed.written,
    "nanogpt": nanogpt.written,
}
"""By the names of the trainers."""


def export(recommendation: Recommendation, to: str, run_dir: str = RUN_DIR) -> str:
    """Return the text for a trainer. Raises ValueError, with the names of all, for one that is not among WRITERS. run_dir: as the user would
    type it."""
    if to not in WRITERS:
        raise ValueError(f"cannot export to '{to}'; {instead(to, [*WRITERS])}")
    answer = replace(recommendation.answer, next=with_run_dir(recommendation.answer.next, run_dir))
    given = recommendation.optimizer
    optimizer = given.model_copy(update={"betas": tuple(map(_to_four_digits, given.betas))})
    return WRITERS[to](as_long_as_the_real_run(replace(recommendation, answer=answer, optimizer=optimizer)))


def _to_four_digits(beta: float) -> float:
    """Return a beta whose distance from 1, which the half-life follows, has four significant digits: of 0.9999998 more are needed than of 0.9."""
    return float(f"{1 - float(f'{1 - beta:.4g}'):.15g}")


def trainers_of(recommendation: Recommendation) -> list[str]:
    """Return the trainers that it can be written for: the script that was studied comes first, and is one for no other study."""
    return [name for name in WRITERS if name != "script" or recommendation.script is not None]


def first_trainer(config: StudyConfig, own_run: OwnRun | None) -> str:
    """Return the trainer that a study's answer is most likely to be pasted into. own_run: of the study's facts."""
    if config.model.target == SCRIPT:
        return "script"
    if own_run is not None:
        return {"transformers": "hf"}.get(own_run.library, own_run.library)
    return "hf" if config.model.target == "hf" or isinstance(config.loss, TransformersLoss) else "torch"
