"""A Trainer of transformers trains in a study as it does by itself; what cannot be honoured is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from batchscout.trainers.before.changing_loss import changing_with_steps
from batchscout.trainers.before.read_source import read
from batchscout.trainers.before.source import Source
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.data.samples import first_of, loaded
from batchscout.trainers.model.losses import loss_function
from batchscout.trainers.sources.adapted import module_of, own_run_of, settings_of
from batchscout.trainers.sources.of_transformers import OfTrainer, own_arguments
from batchscout.trainers.step.learning_rate import factor_at
from tests.support.tiny import cpu_run

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
# What the libraries say of their own deprecations is theirs.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")]
HERE = __name__


def rows(count: int = 32, seed: int = 1) -> Any:
    """Token ids, of whose labels each sample counts another number."""
    drawn = torch.randint(4, 24, (count, 12), generator=torch.Generator().manual_seed(seed))
    labels = drawn.clone()
    for number, row in enumerate(labels):
        row[: number % 10] = -100
    return datasets.Dataset.from_dict(
        {"input_ids": drawn.tolist(), "labels": labels.tolist(), "unused": list(range(count))}
    )


def small(**changes: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model("llama", vocab_size=24, num_key_value_heads=2, **sizes, **changes)
    return transformers.AutoModelForCausalLM.from_config(config)


def arguments(**changes: Any) -> Any:
    told = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "weight_decay": 0.1,
        "lr_scheduler_type": "constant", "report_to": "none", "use_cpu": True, "max_steps": 3, "save_strategy": "no",
        "disable_tqdm": True, "logging_strategy": "no", "output_dir": "/tmp/unused",
    }  # fmt: skip
    return transformers.TrainingArguments(**(told | changes))


def made(cls: Any = None, args: Any = None, **changes: Any) -> Any:
    told = {"train_dataset": rows(), "eval_dataset": rows(8, 2), "data_collator": transformers.default_data_collator}
    return (cls or transformers.Trainer)(model=small(), args=args or arguments(), **(told | changes))


def with_a_schedule(optimizer: torch.optim.Optimizer) -> Any:
    return made(optimizers=(optimizer, transformers.get_linear_schedule_with_warmup(optimizer, 1, 3)))


MADE: dict[str, Callable[[], Any]] = {
    "plain": made,
    "groups of its own": lambda: made(OwnGroups),
    "an optimizer": lambda: made(optimizers=(torch.optim.AdamW(made().model.parameters(), lr=3e-4), None)),
    "a schedule": lambda: with_a_schedule(torch.optim.AdamW(made().model.parameters(), lr=3e-4)),
    "own step": lambda: made(OwnStep),
    "own sampler": lambda: made(OwnSampler),
    "a callback": lambda: made(callbacks=[ChangesWeights()]),
    "no trainer": small,
    "no validation": lambda: made(eval_dataset=None),
    "annealed": lambda: made(Annealed),
}


def of_kind(kind: str) -> Any:
    return MADE[kind]()


def said_of(kind: str) -> Any:
    return read(Source("transformers", f"{HERE}:of_kind", {"kind": kind}))


def trial(**changes: Any) -> TrialConfig:
    said = said_of("plain").keys
    optimizer = {k: v for k, v in said["optimizer"].items() if k not in ("lr", "reference_batch_size", "warmup")}
    shared = {"micro_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "sample_budget": 24}
    places = {"model": said["model"], "data": said["data"], "optimizer": optimizer, "schedule": said["schedule"]}
    return TrialConfig.model_validate({**places, **shared, "compile": False, **changes})


def test_three_steps_end_where_its_own_train_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the same samples, of whose labels unequal numbers count: accumulated, clipped, and decayed in its own groups."""
    run = cpu_run(trial(statistics=False))
    module, trainer = cast(Any, run.module).inner, made()
    initial = copy.deepcopy(module.state_dict())
    trainer.model.load_state_dict(initial)
    order = run.order.indices(range(24))
    # A step's micro-batches take every second of its samples.
    ordered = [i for step in range(3) for k in range(2) for i in order[8 * step + k : 8 * step + 8 : 2]]
    trainer.train_dataset = trainer.train_dataset.select(ordered)
    monkeypatch.setattr(trainer, "_get_train_sampler", lambda *_: torch.utils.data.SequentialSampler(ordered))
    trainer.train()
    for _ in range(3):
        run.step()
    ours = module.state_dict()
    for name, tensor in trainer.model.state_dict().items():
        assert (tensor - ours[name]).norm() < 1e-3 * (tensor - initial[name]).norm(), name


class OwnGroups(transformers.Trainer):
    def create_optimizer(self, *_: Any) -> Any:
        if self.optimizer is None:
            lower, upper = list(self.model.parameters())[:3], list(self.model.parameters())[3:]
            rate = self.args.learning_rate
            self.optimizer = torch.optim.AdamW([{"params": lower, "lr": 0.1 * rate}, {"params": upper, "lr": rate}])
        return self.optimizer


@pytest.mark.parametrize(
    ("kind", "factor"), [("plain", 1.0), ("groups of its own", 10.0), ("an optimizer", None), ("a schedule", None)]
)
def test_what_sets_its_learning_rate_is_known(kind: str, factor: float | None) -> None:
    model = module_of(of_kind(kind))
    assert model is not None
    own = own_run_of(model)
    assert own is not None
    assert (own.rate_factor, own.in_steps) == (None if factor is None else pytest.approx(factor), True)
    assert own.has_schedule == (kind == "a schedule")
    assert own.recipe["batch"] == {"micro_batch_size": 4, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("library", "told"),
    [
        ("transformers", {"ddp_find_unused_parameters": False, "greater_is_better": False, "metric_for_best_model": "accuracy"}),
        ("trl", {"completion_only_loss": False, "eval_packing": False, "ddp_bucket_cap_mb": 0}),
    ],
)  # fmt: skip
def test_a_false_or_zero_in_the_place_of_a_choice_of_the_librarys_is_given_back(
    library: str, told: dict[str, Any]
) -> None:
    shared = {"output_dir": "/tmp/unused", "use_cpu": True, "report_to": "none", "bf16": False}
    made_of = {"transformers": "TrainingArguments", "trl": "SFTConfig"}[library]
    kind = getattr(pytest.importorskip(library), made_of)
    given = own_arguments(kind(**shared, **told))
    again = kind(**given["arguments"])
    assert given["library"] == library
    assert {name: getattr(again, name) for name in told} == told


def test_no_secret_among_its_arguments_is_written_down() -> None:
    trl = pytest.importorskip("trl")
    shared = {"output_dir": "/tmp/unused", "use_cpu": True, "report_to": "none", "bf16": False, "eos_token": "<|end|>"}
    secrets = {"hub_token": "hf_abc", "model_init_kwargs": {"token": "hf_abc", "revision": "main"}}
    given = own_arguments(trl.SFTConfig(**shared, **secrets))
    assert "hf_abc" not in str(given)
    assert {*secrets} <= {*given["not_plain"]}
    assert given["arguments"]["eos_token"] == "<|end|>"
    assert "hub_token" not in own_arguments(trl.SFTConfig(**shared))["not_plain"]


def test_a_batch_of_unequal_labels_is_a_sum_and_a_count() -> None:
    module = OfTrainer(made())
    batch = {key: torch.tensor(rows()[:8][key]) for key in ("input_ids", "labels")}
    loss_sum, num_targets = module(batch)
    parts = [module({key: value[i : i + 1] for key, value in batch.items()}) for i in range(8)]
    assert num_targets == sum(count for _, count in parts) == (batch["labels"][:, 1:] != -100).sum()
    assert loss_sum.item() == pytest.approx(sum(loss.item() for loss, _ in parts), rel=1e-5)


def test_what_arguments_and_optimizer_say_becomes_the_studys_keys() -> None:
    said = said_of("plain")
    assert said.keys["optimizer"] == {
        "lr": 1e-2, "type": "adamw", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1, "max_gradient_norm": 1.0,
        "param_groups": "batchscout.trainers.sources.adapted:param_groups", "reference_batch_size": 8, "warmup": 0,
    }  # fmt: skip
    assert said.run_samples == 24
    assert "loss" not in said.keys, "the Trainer counts the targets itself"


def scheduled(kind: str = "constant", cls: Any = None, **changes: Any) -> Any:
    return made(cls, args=arguments(lr_scheduler_type=kind, max_steps=200, **changes))


class OwnSchedule(transformers.Trainer):
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, num_training_steps // 2, 0.5)
        return self.lr_scheduler


@pytest.mark.parametrize(
    ("told", "factors"),
    [
        ({"kind": "linear"}, {0.0: 1.0, 0.25: 0.75, 1.0: 0.0}),
        ({"kind": "cosine", "warmup_steps": 50}, {0.0: 0.0, 0.125: 0.5, 0.25: 1.0, 0.625: 0.5, 1.0: 0.0}),
        ({"kind": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}}, {0.0: 1.0, 0.25: 0.5, 0.52: 1.0, 0.75: 0.5}),
        ({"kind": "constant_with_warmup", "warmup_steps": 100}, {0.0: 0.0, 0.25: 0.5, 0.5: 1.0, 1.0: 1.0}),
        ({"cls": OwnSchedule}, {0.2: 1.0, 0.45: 1.0, 0.55: 0.5, 1.0: 0.5}),
    ],
)  # fmt: skip
def test_a_schedule_without_a_name_here_keeps_its_shape(told: dict[str, Any], factors: dict[float, float]) -> None:
    said = settings_of(scheduled(**told), None)
    assert (said.keys["optimizer"]["lr"], said.keys["optimizer"]["warmup"]) == (1e-2, 0)
    assert {share: factor_at(said.keys["schedule"]["factors"], share) for share in factors} == {
        share: pytest.approx(factor, abs=0.03) for share, factor in factors.items()
    }


@pytest.mark.parametrize("kind", ["cosine", "constant"])
def test_a_schedule_that_has_a_name_here_is_called_by_it(kind: str) -> None:
    trainer = scheduled(kind)
    assert settings_of(trainer, None).keys["schedule"] == {"type": kind}
    assert trainer.lr_scheduler is None, "its own run makes one of its own"


def test_a_schedule_that_depends_on_the_loss_is_told_and_not_guessed() -> None:
    said = settings_of(scheduled("reduce_lr_on_plateau", eval_strategy="steps"), None)
    assert "schedule" not in said.keys
    assert said.told[0].startswith("its schedule ReduceLROnPlateau follows the training")


@pytest.mark.parametrize("strategy", ["group_by_length", "random"])
def test_that_batches_are_padded_more_than_those_of_about_one_length_is_told(strategy: str) -> None:
    known = arguments(train_sampling_strategy=strategy)
    before = copy.copy(known)  # as older versions of the library have it
    del before.train_sampling_strategy
    before.group_by_length = strategy == "group_by_length"
    for args in (known, before):
        trainer = made()
        trainer.args = args
        told = [one for one in settings_of(trainer, None).told if "padded more" in one]
        assert len(told) == (strategy == "group_by_length")


def the_longest_first() -> Any:
    uneven = rows().map(lambda row, number: {"input_ids": row["input_ids"][: 2 + number % 3]}, with_indices=True)
    return made(train_dataset=uneven.remove_columns("labels"), data_collator=pads)


def pads(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    return {"input_ids": ids, "labels": ids}


def test_the_lengths_of_token_ids_are_known() -> None:
    run = cpu_run(trial(data={"target": f"{HERE}:the_longest_first"}, longest_samples=True, statistics=False))
    train_set = cast(Any, run.train_set)
    assert list(train_set.lengths[:3]) == [2, 3, 4]


# What is refused


class OwnStep(transformers.Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


class OwnSampler(transformers.Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return super()._get_train_sampler(*args)


class OwnLoss(transformers.Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class ChangesWeights(transformers.TrainerCallback):
    def on_step_end(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("own step", "OwnStep overrides training_step, and a study has a training loop of its own; put what it does into compute_loss"),
        ("own sampler", "OwnSampler overrides _get_train_sampler, and every batch of a study must see the same samples in the same order"),
        ("a callback", "the Trainer's callback ChangesWeights has on_step_end, which may change the gradient or the weights"),
        ("no trainer", "returned LlamaForCausalLM; return a Trainer of transformers, or an SFTTrainer of trl"),
    ],
)  # fmt: skip
def test_what_a_study_cannot_honour_is_refused_by_name(kind: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        said_of(kind)


def test_of_a_trainer_without_data_to_validate_on_every_tenth_sample_is_held_out() -> None:
    sets = [first_of(one, 1) for one in loaded(of_kind("no validation"), "a test's")]
    train, val = ([tuple(torch.as_tensor(one[i]["input_ids"]).tolist()) for i in range(len(one))] for one in sets)
    assert sorted(train + val) == sorted(map(tuple, rows()["input_ids"]))
    assert (len(train), len(val)) == (29, 3)
    assert any("every tenth sample is held out" in told for told in said_of("no validation").told)


def test_a_loss_of_its_own_is_honoured() -> None:
    assert isinstance(module_of(made(OwnLoss)), OfTrainer)


class Annealed(transformers.Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss: Any = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss * (1 + self.state.global_step / 1000)


class Smoothed(transformers.Trainer):
    """As the documentation's example of class weights: a mean over the batch, whatever a step counts."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


class Divided(Smoothed):
    loss_is_scaled_for_ga = False


@pytest.mark.parametrize(
    ("kind", "steps", "norm"),
    [(Smoothed, 2, 0.5), (Smoothed, 1, 1.0), (Divided, 2, 1.0), (OwnLoss, 2, 1.0), (transformers.Trainer, 2, 1.0)],
)
def test_the_mean_is_clipped_where_a_trainer_clips_the_sum_of_its_micro_batches(
    kind: Any, steps: int, norm: float
) -> None:
    said = settings_of(made(kind, arguments(gradient_accumulation_steps=steps)), None)
    assert said.keys["optimizer"]["max_gradient_norm"] == norm
    found = [one for one in said.told if f"clips it at {norm:.3g} where the Trainer clips the sum at 1;" in one]
    assert len(found) == (norm == 0.5)


def test_a_rate_of_sgd_that_is_for_a_sum_of_micro_batches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"adds up the gradients of 2 micro-batches.* multiply the learning rate by 2"):
        settings_of(made(Smoothed, arguments(optim="sgd")), None)


@pytest.mark.parametrize("kind", ["plain", "annealed"])
def test_a_loss_that_changes_with_the_steps_of_a_trainer_is_told(kind: str) -> None:
    module = OfTrainer(of_kind(kind))
    batch = module.trainer.data_collator([module.trainer.train_dataset[n] for n in range(2)])
    said = changing_with_steps(module, loss_function(None), batch, torch.device("cpu"))
    assert (said is not None) == (kind == "annealed")
    assert module.trainer.state.global_step == 0


# TRL


def sft(**changes: Any) -> Any:
    trl = pytest.importorskip("trl")
    told = {
        "per_device_train_batch_size": 4,
        "output_dir": "/tmp/unused",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
    }
    return trl.SFTTrainer(
        model=small(pad_token_id=0),
        args=trl.SFTConfig(**(told | changes)),
        train_dataset=rows().remove_columns("unused"),
        eval_dataset=rows(8, 2).remove_columns("unused"),
        processing_class=tokenizer(),
    )


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(24)}, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def test_trls_trainer_for_finetuning_is_a_sum_too_and_its_checkpointing_is_the_studys() -> None:
    trainer = sft()
    trainer.model.gradient_checkpointing_enable()
    assert any(getattr(part, "gradient_checkpointing", False) for part in trainer.model.modules())
    module = module_of(trainer)
    assert isinstance(module, OfTrainer)
    assert not any(getattr(part, "gradient_checkpointing", False) for part in module.modules())
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(4)])
    parts = [module(trainer.data_collator([trainer.train_dataset[index]])) for index in range(4)]
    loss_sum, num_targets = module(batch)
    assert num_targets == sum(count for _, count in parts)
    assert loss_sum.item() == pytest.approx(sum(loss.item() for loss, _ in parts), rel=1e-5)


def test_a_trainer_of_pairs_is_refused_by_name() -> None:
    trl = pytest.importorskip("trl")
    trainer = sft()
    trainer.__class__ = type("Preferences", (trl.DPOTrainer,), {})
    with pytest.raises(
        ValueError, match="Preferences is a DPOTrainer, whose loss is made of generated text, of pairs or of another"
    ):
        module_of(trainer)
