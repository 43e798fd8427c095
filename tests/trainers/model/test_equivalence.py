"""rho is 0 for equal runs, tiny for equal mathematics, large for another experiment; the byte-set similarity is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.loop import train
from batchscout.trainers.model.equivalence import Weights, rho, save_weights, weights_of
from batchscout.trainers.model.gpt import GPT
from batchscout.trainers.model.models import num_batch_norms
from tests.support.tiny import config, cpu_run

WHOLE: dict[str, Any] = {"micro_batch_size": 16, "gradient_accumulation_steps": 1}
SPLIT: dict[str, Any] = {"micro_batch_size": 2, "gradient_accumulation_steps": 8}
WITH_BATCH_NORM: dict[str, Any] = {"model": {"target": "tests.support.studies:BatchNormModel"}}


def ten_steps(*, switch_off_dropout: bool = False, **changes: Any) -> TrialConfig:
    ten = config(sample_budget=160, evaluation_samples=0, **changes)
    return ten.model_copy(update={"dropout": not switch_off_dropout})


RhoBetween = Callable[[TrialConfig, TrialConfig], float]
"""(a run's config, that of its reference) -> rho"""


@pytest.fixture
def rho_between(tmp_path: Path) -> RhoBetween:
    """rho of a run against a reference run, through the file that a run leaves behind."""

    def measure(trial: TrialConfig, reference: TrialConfig) -> float:
        ends: list[dict[str, float]] = []
        train(reference.model_copy(update={"save_weights": True}), lambda report: None, tmp_path / "reference")
        weights = str(tmp_path / "reference" / "weights.pt")
        compared = trial.model_copy(update={"reference_weights": weights})
        train(compared, lambda report: ends.append(report.metrics), tmp_path / "compared")
        return ends[-1]["rho"]

    return measure


def byte_set_similarity(a: bytes, b: bytes) -> float:
    """The Jaccard similarity of the sets of byte values, which is sometimes used to compare weights."""
    return len(set(a) & set(b)) / len(set(a) | set(b))


def test_the_similarity_of_byte_sets_calls_anything_equal_that_is_a_few_kilobytes_long() -> None:
    """A random file shows all 256 byte values after some 1,600 bytes, so it compares two full sets."""
    one, other = (
        weights_of(GPT(vocab_size=64, seq_len=16, num_layers=1, num_heads=2, hidden_dim=64)) for _ in range(2)
    )
    weights = [b"".join(value.numpy().tobytes() for value in w.values()) for w in (one, other)]
    noise = random.Random(0).randbytes(len(weights[0]))
    assert byte_set_similarity(weights[0], weights[1]) == 1.0
    assert byte_set_similarity(weights[0], noise) == 1.0
    one, other = ({name: value for name, value in w.items() if value.dim() > 1} for w in (one, other))
    nothing = {name: torch.zeros_like(value) for name, value in one.items()}
    assert rho(other, one, nothing) == pytest.approx(2**0.5, rel=0.05), "while rho calls unrelated weights unrelated"


def test_a_run_is_at_distance_0_from_itself(rho_between: RhoBetween) -> None:
    assert rho_between(ten_steps(**SPLIT), ten_steps(**SPLIT)) == 0.0


def test_two_splits_in_float32_end_at_the_same_weights(rho_between: RhoBetween) -> None:
    """Padded targets included; AdamW."""
    assert 0 < rho_between(ten_steps(padded=True, **SPLIT), ten_steps(padded=True, **WHOLE)) <= 1e-4


@pytest.mark.slow
def test_two_splits_in_bfloat16_differ_by_less_than_bfloat16_differs_from_float32(rho_between: RhoBetween) -> None:
    low = {"padded": True, "precision": "bfloat16"}
    between_splits = rho_between(ten_steps(**SPLIT, **low), ten_steps(**WHOLE, **low))
    of_the_precision = rho_between(ten_steps(padded=True, **SPLIT), ten_steps(**SPLIT, **low))
    assert 0 < between_splits < of_the_precision < 0.1


def test_another_seed_is_another_experiment(rho_between: RhoBetween) -> None:
    assert rho_between(ten_steps(seed=1, **WHOLE), ten_steps(**WHOLE)) > 1.0


def test_dropout_makes_a_split_another_experiment(rho_between: RhoBetween) -> None:
    assert rho_between(ten_steps(dropout=0.2, **SPLIT), ten_steps(dropout=0.2, **WHOLE)) > 0.05


def test_batch_norm_makes_a_split_another_experiment_and_is_counted(rho_between: RhoBetween) -> None:
    whole, split = ten_steps(**WHOLE, **WITH_BATCH_NORM), ten_steps(**SPLIT, **WITH_BATCH_NORM)
    assert rho_between(split, whole) > 0.02
    run = cpu_run(whole)
    assert num_batch_norms(run.module) == run.metrics()["num_batch_norms"] == 1


def test_rho_is_the_distance_in_units_of_the_way_travelled() -> None:
    initial = {"a": torch.tensor([0.0, 0.0]), "b": torch.tensor([1.0])}
    reference = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([5.0])}
    final = {"a": torch.tensor([3.0, 0.5]), "b": torch.tensor([5.0])}
    assert rho(final, reference, initial) == pytest.approx(0.1)


def test_the_initial_weights_of_the_file_are_those_that_the_run_began_with(tmp_path: Path) -> None:
    trial = ten_steps(**SPLIT, save_weights=True)
    began = weights_of(cpu_run(trial).module)
    train(trial, lambda report: None, tmp_path)
    saved = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert saved["initial"].keys() == saved["final"].keys() == began.keys()
    assert all(torch.equal(saved["initial"][name], began[name]) for name in began)


# A split against its control: the same samples in another order


class Attending(nn.Module):
    """A ViT in small: the key bias of its attention has no gradient but rounding, since softmax takes no notice of it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.patches, self.head = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        x = self.patches(batch["patches"])
        x = x + self.attention(x, x, x, need_weights=False)[0]
        loss_sum = nn.functional.cross_entropy(self.head(x.mean(1)), batch["label"], reduction="sum")
        return loss_sum, torch.tensor(len(batch["label"]))


def patches() -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    samples = [
        {"patches": torch.randn(9, 6, generator=generator), "label": torch.tensor(number % 4)} for number in range(64)
    ]
    return samples, samples[:4]


def mean_of_a_micro_batch(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss_sum, num_targets = module(batch)
    return loss_sum / num_targets, torch.ones(())


ATTENDING: dict[str, Any] = {
    "model": {"target": "tests.trainers.model.test_equivalence:Attending"},
    "data": {"target": "tests.trainers.model.test_equivalence:patches"},
}
WITHOUT_DROPOUT: dict[str, Any] = {"dropout": 0.3, "switch_off_dropout": True}
REFERENCE: dict[str, Any] = {"micro_batch_size": 8, "gradient_accumulation_steps": 2}


def distances(**changes: Any) -> tuple[float, float]:
    """(rho of a split in eight micro-batches, the largest of three controls), both from the same reference."""

    def end(**more: Any) -> Weights:
        run = cpu_run(ten_steps(**changes, **more), steps=10)
        return weights_of(run.module)

    reference, began = end(**REFERENCE), cpu_run(ten_steps(**changes, **REFERENCE)).initial_weights(Path("/nowhere"))
    controls = [rho(end(**REFERENCE, sample_permutation=number), reference, began) for number in (1, 2, 3)]
    return rho(end(**SPLIT), reference, began), max(controls)


@pytest.mark.parametrize("changes", [{}, {"padded": True}, WITHOUT_DROPOUT], ids=["gpt", "padded", "dropout off"])
def test_a_sound_split_and_its_control_differ_from_the_reference_by_rounding(changes: dict[str, Any]) -> None:
    assert all(0 < distance <= 1e-4 for distance in distances(**changes))


def test_what_rounding_makes_of_a_key_bias_no_constant_tells_and_the_control_does() -> None:
    split, control = distances(**ATTENDING, learning_rate=1e-3)
    assert split > 1e-4
    assert split <= 3 * control


@pytest.mark.parametrize(
    "changes",
    [
        {"padded": True, "loss": "tests.trainers.model.test_equivalence:mean_of_a_micro_batch"},
        {"padded": True, "loss": "tests.support.studies:over_the_longest"},
        WITH_BATCH_NORM,
    ],
    ids=["mean", "over the longest", "BatchNorm"],
)
def test_the_control_does_not_cover_for_a_fault(changes: dict[str, Any]) -> None:
    """No sample leaves its micro-batch in it, so a mean over unequal lengths, or BatchNorm, stays what it is."""
    split, control = distances(**changes)
    assert control < 1e-4
    assert split > 0.02


def test_running_statistics_are_compared_and_counters_are_not() -> None:
    names = weights_of(cpu_run(ten_steps(**WHOLE, **WITH_BATCH_NORM)).module).keys()
    assert "norm.running_mean" in names
    assert "norm.num_batches_tracked" not in names


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    a, b = {"a": torch.ones(2)}, {"b": torch.ones(2)}
    with pytest.raises(
        ValueError, match="different parameters and cannot be compared; use the same model configuration"
    ):
        rho(a, b, b)
    with pytest.raises(ValueError, match="moved no weight, so rho has no scale; raise the learning rate"):
        rho(a, a, a)
    save_weights(tmp_path / "new" / "weights.pt", a, a)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["weights.pt"]
