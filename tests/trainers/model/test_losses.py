"""Whatever a study file names as its loss, it is a sum and a count that add up over any split of a batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from batchscout.trainers.config import TrialConfig
from batchscout.trainers.criteria import Loss, import_path, spoken
from batchscout.trainers.data.batches import fetch
from batchscout.trainers.model.adding_up import check_sum, not_adding_up
from batchscout.trainers.model.losses import loss_function
from tests.support.ranks import on_two_ranks
from tests.support.tiny import LogitsOnly, config, cpu_run, data, gradient_of_step, losses_of, relative_error

CPU = torch.device("cpu")
BATCH, CLASSES = 6, 5


def of(told: object) -> Callable[[Any, Any], tuple[Tensor, Tensor]]:
    return loss_function(TypeAdapter(Loss).validate_python(told))


def returning(outputs: Any) -> Any:
    """A module that returns this whatever it is called with, and keeps what it was called with."""

    class Returning(nn.Module):
        called_with: Any = None

        def forward(self, *inputs: Any, **named: Any) -> Any:
            self.called_with = inputs or named
            return outputs

    return Returning()


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def classes(*shape: int, ignored: int = -100) -> Tensor:
    """Classes, every third of which does not count."""
    found = torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(2))
    found.view(-1)[::3] = ignored
    return found


@pytest.mark.parametrize(
    ("told", "outputs", "targets", "expected"),
    [
        ("cross_entropy", drawn(BATCH, CLASSES), classes(BATCH),
         lambda x, y: (F.cross_entropy(x, y, reduction="sum"), 4)),
        ("cross_entropy", drawn(BATCH, 7, CLASSES), classes(BATCH, 7),
         lambda x, y: (F.cross_entropy(x.transpose(1, 2), y, reduction="sum"), 28)),
        ("cross_entropy", drawn(BATCH, CLASSES, 3, 4), classes(BATCH, 3, 4),
         lambda x, y: (F.cross_entropy(x, y, reduction="sum"), 48)),
        ({"type": "cross_entropy", "ignore_index": 255}, drawn(BATCH, CLASSES), classes(BATCH, ignored=255),
         lambda x, y: (F.cross_entropy(x, y, reduction="sum", ignore_index=255), 4)),
        ("mse", drawn(BATCH, 3), drawn(BATCH, 3) + 1, lambda x, y: ((x - y).square().sum(), 18)),
        ("bce_with_logits", drawn(BATCH, 3), (drawn(BATCH, 3) > 0).long(),
         lambda x, y: (F.binary_cross_entropy(x.sigmoid(), y.float(), reduction="sum"), 18)),
    ],
    ids=["classes", "classes last", "classes second", "another index", "mse", "bce"],
)  # fmt: skip
def test_a_criterion_is_summed_over_the_targets_that_count(
    told: Any, outputs: Tensor, targets: Tensor, expected: Callable[[Tensor, Tensor], tuple[Tensor, int]]
) -> None:
    loss_sum, num_targets = of(told)(returning(outputs), (torch.zeros(BATCH), targets))
    wanted, count = expected(outputs, targets)
    assert loss_sum.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert num_targets.item() == count


def test_inputs_reach_the_module_as_the_batch_has_them() -> None:
    outputs, labels, image, age = drawn(BATCH, CLASSES), classes(BATCH), drawn(BATCH, 2), drawn(BATCH, 1)
    wanted = of("cross_entropy")(returning(outputs), (image, labels))
    for batch, told, called_with in (
        ([image, age, labels], "cross_entropy", (image, age)),
        ({"image": image, "age": age, "labels": labels}, "cross_entropy", {"image": image, "age": age}),
        ({"image": image, "y": labels}, {"type": "cross_entropy", "targets": "y"}, {"image": image}),
    ):
        module = returning(outputs)
        assert of(told)(module, batch) == wanted
        assert module.called_with == called_with
    for returned in (SimpleNamespace(logits=outputs), {"logits": outputs}, (outputs, None)):
        assert of("cross_entropy")(returning(returned), (image, labels)) == wanted


@pytest.mark.parametrize(
    ("told", "outputs", "batch", "said"),
    [
        ("cross_entropy", drawn(2, 3), {"x": 1, "label": 2},
         "a batch has no 'labels' (it has: x, label); name its key: loss: {type: cross_entropy, targets: KEY}"),
        ("transformers", drawn(2, 3), {"input_ids": 1},
         "a batch has no 'labels' (it has: input_ids); loss: transformers needs them there"),
        ("transformers", drawn(2, 3), {"input_ids": 1, "targets": 2},
         "loss: transformers needs them there; for 'targets' it is loss: {type: cross_entropy, targets: targets}"),
        ("mse", drawn(2, 3), drawn(2, 3), "a batch is a Tensor, in which loss: mse finds no targets; let samples be tuples"),
        ("mse", None, (1, drawn(2)), "needs the module's outputs as a tensor, and it returned a NoneType; return the tensor, alone"),
        ("mse", {"scores": 1}, (1, drawn(2)), "what the module returned has no 'logits' (it has: scores); return them under this name"),
        ("cross_entropy", drawn(8, 5), (1, drawn(8, 5)), "the logits are 8 x 5 and the targets 8 x 5, which are not one class"),
        ("transformers", drawn(2, 3), [1, 2], "a batch is a list, no dictionary with 'labels'; loss: transformers needs them there"),
        ("mse", drawn(8, 1), (1, drawn(8)), "the outputs are 8 x 1 and the targets 8, and mse would stretch one over the other"),
        ("cross_entropy", drawn(8, 9, 5), (1, classes(8, 7)),
         "the logits are 8 x 9 x 5 and the targets 8 x 7, which are not one class for each target; return logits"),
        ("cross_entropy", drawn(8, 5, 5), (1, classes(8, 5)),
         "the logits are 8 x 5 x 5 and the targets 8 x 5, and classes could be last or second; return logits"),
        ("mean", drawn(2), (drawn(2), drawn(2)), "loss: mean needs one scalar tensor, and the module returned a Tensor without"),
        ("mean", (drawn(1)[0], drawn(1)[0]), (drawn(2), drawn(2)), "returned a tuple without one; return the loss alone"),
        ("mean", drawn(1)[0], drawn(2), "a batch is a Tensor, in which loss: mean finds no targets to count; let samples"),
        ("mean", drawn(1)[0], {"x": drawn(2)}, "no 'labels' (it has: x); name its key: loss: {type: mean, targets: KEY}"),
        ({"type": "mean", "over": "tokens"}, None, None, "over is 'tokens'; use targets, samples, or your own count as"),
    ],
)  # fmt: skip
def test_a_batch_or_an_output_that_does_not_fit_is_refused_with_the_remedy(
    told: Any, outputs: Any, batch: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        of(told)(returning(outputs), batch)


@pytest.mark.parametrize("last", [True, False])
def test_a_length_that_is_the_number_of_classes_is_read_as_the_batches_before_it(last: bool) -> None:
    """As padding makes of samples of uneven length, in the middle of a run."""
    loss = of("cross_entropy")
    for length in (7, CLASSES, 4, CLASSES):
        logits, targets = drawn(BATCH, length, CLASSES), classes(BATCH, length)
        loss_sum, _ = loss(returning(logits if last else logits.transpose(1, 2)), (1, targets))
        torch.testing.assert_close(loss_sum, F.cross_entropy(logits.transpose(1, 2), targets, reduction="sum"))


def test_a_loss_is_written_in_short_or_in_full() -> None:
    read = TypeAdapter(Loss).validate_python
    assert read("mse") == read({"type": "mse"})
    own = read("package.module:loss")
    assert own == read({"type": "own", "target": "package.module:loss"}) == read(own.model_dump())
    assert own.model_dump() == "package.module:loss", "as earlier versions wrote it into their journals"
    assert (import_path(own), spoken(own)) == ("package.module:loss",) * 2
    assert (import_path(read("mse")), spoken(read("mse"))) == ("", "mse")


def by_hand(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits, targets = module(batch["input_ids"]), batch["targets"]
    loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss_sum, (targets != -100).sum()


def test_a_run_with_a_criterion_is_that_of_the_same_loss_written_by_hand() -> None:
    model, by_hand = {"target": "tests.support.tiny:LogitsOnly"}, "tests.trainers.model.test_losses:by_hand"
    criterion, written = (
        losses_of(config(model=model, loss=told, padded=True, gradient_accumulation_steps=2), 3)
        for told in ({"type": "cross_entropy", "targets": "targets"}, by_hand)
    )
    assert criterion == written


# Models of transformers, each with its own idea of which labels count

SMALL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "vocab_size": 24}
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, **SMALL}
GPT2 = {"n_layer": 1, "n_head": 2, "n_embd": 16, **SMALL, "pad_token_id": None}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0, **SMALL}


def language_samples() -> list[dict[str, Tensor]]:
    """Samples with 11, 8, 5 and 2 labels that count, the first of them among them."""
    samples = []
    for number in range(4):
        ids = torch.randint(1, 24, (11,), generator=torch.Generator().manual_seed(number))
        labels = ids.clone()
        labels[11 - 3 * number :] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def classified_samples() -> list[dict[str, Tensor]]:
    return [one | {"labels": torch.tensor(number % 2)} for number, one in enumerate(language_samples())]


def transformers_model(kind: str, model_type: str, settings: dict[str, Any]) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, kind).from_config(transformers.AutoConfig.for_model(model_type, **settings)).eval()


@pytest.mark.parametrize(
    ("kind", "model_type", "settings", "samples"),
    [
        ("AutoModelForCausalLM", "gpt2", GPT2, language_samples()),
        ("AutoModelForMaskedLM", "bert", BERT, language_samples()),
        ("AutoModelForSeq2SeqLM", "t5", T5, language_samples()),
        ("AutoModelForSequenceClassification", "bert", BERT, classified_samples()),
    ],
    ids=["next token", "masked", "encoder and decoder", "classes"],
)
def test_the_mean_that_a_transformers_model_returns_becomes_a_sum_that_adds_up(
    kind: str, model_type: str, settings: dict[str, Any], samples: Any
) -> None:
    module = transformers_model(kind, model_type, settings)
    batch = fetch(samples, range(4))
    loss_sum, num_targets = of("transformers")(module, batch)
    assert (loss_sum / num_targets).item() == pytest.approx(module(**batch).loss.item(), rel=1e-6)
    alone = [of("transformers")(module, fetch(samples, [index])) for index in range(4)]
    assert sum(part.item() for part, _ in alone) == pytest.approx(loss_sum.item(), rel=1e-5)
    check_sum(module, of("transformers"), samples, CPU)
    assert not_adding_up(module, of("transformers"), samples, CPU) is None


class Uneven(list[dict[str, Tensor]]):
    """Samples of 2 to 11 tokens, padded to the longest of a micro-batch."""

    lengths = (11, 8, 5, 2)

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        longest = max(self.lengths[index % 4] for index in indices)
        return [{key: value[:longest] for key, value in self[index].items()} for index in indices]


def uneven_data() -> tuple[Uneven, Uneven]:
    return Uneven(language_samples()), Uneven(language_samples())


DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")


def bare_gpt2() -> nn.Module:
    return transformers_model("AutoModelForCausalLM", "gpt2", GPT2 | dict.fromkeys(DROPOUTS, 0.0))


def bare(**changes: Any) -> TrialConfig:
    own = {
        "model": {"target": "tests.trainers.model.test_losses:bare_gpt2"},
        "data": {"target": "tests.trainers.model.test_losses:uneven_data"},
        "loss": "transformers",
        "optimizer": {"max_gradient_norm": None},
    }
    return config(**(own | changes))


def gradients_of_two_ranks() -> list[Tensor]:
    return [
        gradient_of_step(cpu_run(bare(micro_batch_size=2, world_size=2, parallel=kind))) for kind in ("ddp", "fsdp")
    ]


@pytest.mark.slow
def test_of_a_bare_transformers_model_two_ranks_have_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    """Its ranks have unequal numbers of labels, and a mean of each."""
    whole = gradient_of_step(cpu_run(bare(micro_batch_size=4)))
    for of_rank in on_two_ranks(gradients_of_two_ranks, tmp_path):
        for gradient in of_rank:
            assert relative_error(gradient, whole) < 1e-5


def test_a_bare_transformers_model_trains_checkpointed_on_samples_of_uneven_length() -> None:
    """Its cache of keys and values would be filled by a block's first forward, and be of the wrong length in the second."""
    plain, again = (losses_of(bare(micro_batch_size=2, activation_checkpointing=one), 4) for one in ("none", "full"))
    assert plain == again


def test_a_batch_in_which_no_label_counts_adds_nothing() -> None:
    module = transformers_model("AutoModelForCausalLM", "gpt2", GPT2)
    batch = fetch(language_samples(), range(2))
    loss_sum, num_targets = of("transformers")(module, batch | {"labels": torch.full_like(batch["labels"], -100)})
    loss_sum.backward()
    assert (loss_sum.item(), num_targets.item()) == (0.0, 0)
    assert all(not p.grad.any() for p in module.parameters() if p.grad is not None)


def test_a_transformers_model_without_a_loss_is_refused() -> None:
    module = transformers_model("AutoModel", "bert", BERT)
    module.forward = lambda **_: SimpleNamespace(loss=None)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(
        ValueError, match=r"BertModel returned no loss; give a model whose forward takes labels, or name a"
    ):
        of("transformers")(module, fetch(language_samples(), range(2)))


def mean_times_samples(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A mean over targets that was multiplied by the number of samples: right only where all have as many targets."""
    loss_sum, num_targets = of({"type": "cross_entropy", "targets": "targets"})(module, batch)
    return loss_sum / num_targets * len(batch["input_ids"]), torch.tensor(len(batch["input_ids"]))


def random_loss(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss_sum, num_targets = of({"type": "cross_entropy", "targets": "targets"})(module, batch)
    return loss_sum * torch.rand(len(batch["input_ids"])).mean(), num_targets


def test_a_mean_times_the_samples_is_told_where_they_have_unequal_numbers_of_targets() -> None:
    said = r"the model's loss_sum of 4 samples is [\d.]+ in one batch, and [\d.]+ added up one by one$"
    padded, _ = data(padded=True)
    module = LogitsOnly(vocab_size=24)
    assert re.match(said, str(not_adding_up(module, mean_times_samples, padded, CPU)))
    assert not_adding_up(module, mean_times_samples, data()[0], CPU) is None


class Spikes(nn.Module):
    """Inputs are drawn, and what comes out is 0 as long as no sum is above the threshold: only the gradient hangs on what was drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        charge = self.linear((torch.rand_like(x) < 0.5).float())
        spikes = (charge > 100).float() + charge - charge.detach()  # the gradient of what stands in for a threshold
        return F.mse_loss(spikes, wanted)


def test_of_a_gradient_that_random_numbers_move_nothing_can_be_said() -> None:
    samples: Any = TensorDataset(drawn(16, 8), F.one_hot(torch.arange(16) % 3, 3).float())
    assert not_adding_up(Spikes(), of({"type": "mean", "over": "samples"}), samples, CPU) is None


class MeanOfTargets(nn.Module):
    """A module that computes its loss itself, as many training scripts have it: (logits, loss), the loss a mean."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.inner = LogitsOnly(vocab_size=vocab_size)

    def forward(self, input_ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.inner(input_ids)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("over", "adds_up"), [("targets", True), ("samples", False), (f"{__name__}:count_of_targets", True)]
)
def test_the_mean_that_a_module_returns_is_a_sum_if_it_is_known_what_it_is_a_mean_over(
    over: str, adds_up: bool
) -> None:
    padded, _ = data(padded=True)
    module, loss = MeanOfTargets(vocab_size=24), of({"type": "mean", "over": over, "targets": "targets"})
    loss_sum, num_targets = loss(module, batch := fetch(padded, range(8)))
    _, count = of({"type": "cross_entropy", "targets": "targets"})(LogitsOnly(vocab_size=24), batch)
    assert (num_targets == count) == adds_up
    assert loss_sum.item() == pytest.approx(module(**batch)[1].item() * num_targets.item())
    assert (not_adding_up(module, loss, padded, CPU) is None) == adds_up
    check_sum(module, loss, padded, CPU)


def count_of_targets(batch: dict[str, Tensor]) -> Tensor:
    return (batch["targets"] != -100).sum()


class Weighted(nn.Module):
    """Its classes have weights, and its mean is torch's: over their sum. At its first step all losses are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x), labels, weight=CLASS_WEIGHTS)


CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.5])


def sum_of_class_weights(batch: tuple[Tensor, Tensor]) -> Tensor:
    return CLASS_WEIGHTS[batch[1]].sum()


@pytest.mark.parametrize(
    ("over", "said"),
    [
        (
            "targets",
            r"the gradient of 4 samples in one batch is \d+% of its length away from the sum of theirs one by one",
        ),
        (f"{__name__}:sum_of_class_weights", "None"),
    ],
)
def test_class_weights_in_a_mean_are_seen_though_all_losses_are_equal(over: str, said: str) -> None:
    """In a set that is sorted by its classes, one of which is rare."""
    labels = torch.tensor([0] * 900 + [1] * 30 + [2] * 70)
    samples: Any = TensorDataset(drawn(1000, 4), labels)
    module, loss = Weighted(), of({"type": "mean", "over": over})
    assert re.match(said, str(not_adding_up(module, loss, samples, CPU)))
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_mean_over_no_target_adds_nothing() -> None:
    nothing = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "targets": torch.full((1, 4), -100)}
    loss_sum, num_targets = of({"type": "mean", "targets": "targets"})(MeanOfTargets(vocab_size=24), nothing)
    assert (loss_sum.item(), num_targets.item()) == (0.0, 0)


class MaskedByHand(nn.Module):
    """Its mean is over what it counts itself: 0/0 where that is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        losses, counts = F.cross_entropy(self.linear(x), labels, reduction="none"), labels != -100
        return (losses * counts).sum() / counts.sum()


@pytest.mark.parametrize("empty_first", [False, True])
def test_a_micro_batch_without_targets_adds_nothing_to_the_gradient_of_a_mean(empty_first: bool) -> None:
    x, labels = drawn(3, 4), torch.tensor([0, 2, 1])
    micro_batches = [(x, labels), (drawn(2, 4), torch.full((2,), -100))]
    gradients = []
    for parts in (micro_batches[:1], micro_batches[::-1] if empty_first else micro_batches):
        torch.manual_seed(0)
        module, loss = MaskedByHand(), of("mean")
        for part in parts:
            loss(module, part)[0].backward()
        gradients.append(module.linear.weight.grad)
    assert gradients[0] is not None
    assert gradients[0].norm() > 0
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize(
    "returned",
    [(drawn(2, 3), drawn(1)[0]), {"loss": drawn(1)[0]}, SimpleNamespace(loss=drawn(1)[0]), drawn(1)[0]],
    ids=["in a tuple", "in a dictionary", "as an attribute", "alone"],
)
def test_the_mean_is_found_in_what_the_module_returns(returned: Any) -> None:
    loss_sum, num_targets = of("mean")(called := returning(returned), (torch.zeros(2), torch.tensor([1, -100])))
    assert (loss_sum.item(), num_targets.item()) == (drawn(1).item(), 1)
    assert len(called.called_with) == 2, "the targets are handed over, too"


def test_of_a_loss_that_draws_random_numbers_nothing_is_said() -> None:
    assert not_adding_up(LogitsOnly(vocab_size=24), random_loss, data()[0], CPU) is None
