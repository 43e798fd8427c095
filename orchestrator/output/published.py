"""What a published formula would have picked, to hold a recommendation against."""

from __future__ import annotations

from dataclasses import dataclass

from batchscout.orchestrator.config.keys import StudyConfig, begins_with_weights
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.trial import Trial


@dataclass(frozen=True)
class StepLaw:
    """The Step Law of language models that AdamW trains: Li et al. 2025, arXiv 2503.04715 (v7, abstract and section 1).

    It was fitted on runs of billions of tokens; elsewhere it is an extrapolation. N counts all parameters here, embeddings
    among them.
    """

    num_parameters: int
    num_tokens: float

    @property
    def learning_rate(self) -> float:
        return 1.79 * self.num_parameters**-0.713 * self.num_tokens**0.307

    @property
    def batch_tokens(self) -> float:
        return 0.58 * self.num_tokens**0.571


def published_pick(config: StudyConfig, facts: Facts, winner: Trial) -> str | None:
    """Return what the Step Law picks for the winner's model and tokens, in the real run where there is one; None where the winner is no
    language model that AdamW trains from random weights, or was not timed."""
    rate, seconds = winner.metric("tokens_per_second"), winner.metric("step_seconds")
    if facts.num_parameters is None or not rate or not seconds or winner.config.optimizer.type != "adamw":
        return None
    if config.model.peft is not None or begins_with_weights(config):
        return None  # it was fitted on models that are trained whole, from random weights
    tokens_per_sample = rate * seconds / winner.config.last_effective_batch_size  # that of the last steps
    if tokens_per_sample < 2 or (facts.counted or "tokens") != "tokens":  # one target for each sample: a classifier
        return None
    real_samples = config.real_run.samples if config.real_run else None
    law = StepLaw(facts.num_parameters, (real_samples or winner.config.sample_budget) * tokens_per_sample)
    batch = max(1, round(law.batch_tokens / tokens_per_sample))
    length = f" for {real_samples:,} samples" if real_samples else ""
    return f"the Step Law (arXiv 2503.04715) would pick effective batch {batch} at learning rate {law.learning_rate:.2g}{length}"
