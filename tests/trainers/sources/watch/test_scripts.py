"""What is taken of scripts as people write them: each runs as it is until its second optimizer step."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import re
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from batchscout.trainers.before.digests import MODEL, digest_of_model
from batchscout.trainers.before.read_source import read
from batchscout.trainers.before.source import Source
from batchscout.trainers.config import resolve
from batchscout.trainers.errors import LossNotSeen
from batchscout.trainers.sources.adapted import own_run_of, param_groups, settings_of
from batchscout.trainers.sources.watch import script
from batchscout.trainers.sources.watch.loop import Loop
from batchscout.trainers.step.learning_rate import factor_at
from tests.support.scripts import HEAD, PLAIN, keys_of, model_of, sets_of, watched


@pytest.fixture(autouse=True)
def folder(home: Path) -> Path:
    return home


def test_a_loop_over_a_loader_gives_model_data_loss_and_recipe(folder: Path) -> None:
    loop = watched(folder, PLAIN)
    keys = keys_of(loop)
    recipe = {"type": "sgd", "lr": 0.1, "betas": [0.9, 0.0], "weight_decay": 0.0, "reference_batch_size": 6}
    assert recipe.items() <= keys["optimizer"].items()
    assert (keys["schedule"], keys["precision"], keys["run_samples"]) == ({"type": "constant"}, "float32", 300)
    train, val = sets_of(loop)
    assert (len(train.dataset), len(val.dataset)) == (60, 20)


def test_each_run_has_weights_of_its_own_and_they_are_the_scripts_first_ones(folder: Path) -> None:
    loop = watched(folder, PLAIN)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(HEAD, names)
    one, other = model_of(loop), model_of(script.made(script="train.py"))
    for first, own, again in zip(names["net"].parameters(), one.parameters(), other.parameters(), strict=True):
        assert torch.equal(first, own)
        assert own is not again
    batch = next(iter(sets_of(loop)[0]))
    for model in (one, other, one):
        model.zero_grad()
        model(batch).backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_model_is_known_by_what_its_loss_reads_and_not_by_all_that_the_script_has(folder: Path) -> None:
    text = """
        class Endless:
            def __len__(self): return 1
            def __getitem__(self, place): return Endless()
        seen, weight = Endless(), {weight}
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for x, y in train_loader:
            optimizer.zero_grad(); (F.cross_entropy(net(x), y) * weight).backward(); optimizer.step()
    """
    found = [
        digest_of_model(model_of(watched(folder, text.format(weight=weight))))[MODEL] for weight in (1.0, 1.0, 2.0)
    ]
    assert found[0] == found[1] != found[2]


def test_the_memory_of_a_run_is_free_when_it_has_ended(folder: Path) -> None:
    loop = watched(folder, PLAIN)
    model = model_of(loop)
    model(next(iter(sets_of(loop)[0]))).backward()
    kept = [weakref.ref(p) for p in model.parameters()]
    del model
    gc.collect()
    assert [one() for one in kept if one() is not None] == []


ACCUMULATED = """
optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
for step, (x, y) in enumerate(train_loader):
    loss = F.cross_entropy(net(x), y) {divided}
    loss.backward()
    if (step + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("divided", "is_averaged"), [("/ 4", True), ("", False)])
def test_accumulated_micro_batches_are_one_step_and_a_sum_of_them_is_told(
    folder: Path, divided: str, is_averaged: bool
) -> None:
    loop = watched(folder, ACCUMULATED.format(divided=divided))
    keys = keys_of(loop)
    assert keys["optimizer"]["reference_batch_size"] == 24
    assert loop.is_averaged == is_averaged
    told = " ".join(settings_of(loop, None).told)
    assert ("adds up the gradients of 4 micro-batches" in told) != is_averaged
    model, batch = model_of(loop), next(iter(sets_of(loop)[0]))
    model.eval()
    wanted = nn.functional.cross_entropy(model.inner(batch[0]), batch[1])
    assert model(batch).item() == pytest.approx(wanted.item(), rel=1e-5), "the loss of a micro-batch by itself"


@pytest.mark.parametrize(
    ("loss", "is_averaged"),
    [
        ("F.cross_entropy(net(x.to('cpu')), y) / 4", True), ("F.cross_entropy(net(x / 4), y)", False),
        ("torch.mean(F.cross_entropy(net(x.to('cpu')), y, reduction='none') / 4)", True),
    ],
)  # fmt: skip
def test_a_loss_is_averaged_where_it_is_divided_itself(folder: Path, loss: str, is_averaged: bool) -> None:
    text = ACCUMULATED.format(divided="").replace("F.cross_entropy(net(x), y)", loss)
    assert watched(folder, text).is_averaged == is_averaged


CLIPPED = """
optimizer, count = torch.optim.Adam(net.parameters(), lr=0.1), {count}
for number, (x, y) in enumerate(train_loader):
    F.cross_entropy(net(x), y, reduction="{reduction}").backward()
    if (number + 1) % count == 0:
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.6)
        optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("reduction", "count", "wanted"), [("mean", 1, 0.6), ("sum", 1, 0.1), ("mean", 2, 0.3), ("sum", 2, 0.05)]
)
def test_the_mean_of_a_step_is_clipped_where_the_script_clips_the_sum(
    folder: Path, reduction: str, count: int, wanted: float
) -> None:
    loop = watched(folder, CLIPPED.format(reduction=reduction, count=count))
    own = own_run_of(model_of(dataclasses.replace(loop, sums=reduction == "sum")))
    assert own is not None
    assert own.adds_up is (wanted != 0.6)
    said = read(Source("script", "train.py", {"args": []}))
    assert said.keys["optimizer"]["max_gradient_norm"] == pytest.approx(wanted)
    assert any(f"clips the mean at {wanted:.3g}" in one for one in said.told) is (wanted != 0.6)


SCHEDULED = """
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
schedule = {made}
for epoch in range(4):
    for x, y in train_loader:
        optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
        {by_step}
    {by_pass}
"""


@pytest.mark.parametrize(
    ("made", "by", "factors"),
    [
        ("torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)", "by_pass", [1, 0.5, 0.25, 0.125]),
        ("torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)", "by_step", [1, 0.5, 0.25, 0.125]),
        ("torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 39)", "by_step", [0.9, 0.65, 0.4, 0.1]),
        ("torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)", "by_step", None),
        ("torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)", "by_step", None),
    ],
)
def test_a_schedule_keeps_its_shape(folder: Path, made: str, by: str, factors: list[float] | None) -> None:
    steps = {"by_step": "", "by_pass": ""} | {by: "schedule.step()"}
    keys = keys_of(watched(folder, SCHEDULED.format(made=made, **steps)))
    kind = keys["schedule"]["type"]
    assert kind == ("table" if factors else "cosine" if "Cosine" in made else "constant")
    assert (keys["optimizer"]["lr"], keys["optimizer"]["warmup"]) == (0.1, 0)
    for share, factor in zip((0.1, 0.35, 0.6, 0.9), factors or (), strict=False):
        assert factor_at(keys["schedule"]["factors"], share) == pytest.approx(factor, abs=0.02)


def rates_of_a_whole_run(text: str) -> list[float]:
    """Return the learning rate that a script has in each of its optimizer steps."""
    rates = list[float]()
    hook = register_optimizer_step_pre_hook(lambda one, *_: rates.append(float(one.param_groups[0]["lr"])))
    try:
        exec(HEAD + textwrap.dedent(text), {})
    finally:
        hook.remove()
    return rates


def follows(loop: Loop, text: str) -> bool:
    """True if a study has, in each step of the script's run, the rate that the script has, but where its table is drawn out over a jump."""
    keys, rates = keys_of(loop), rates_of_a_whole_run(text)
    highest, last, factors = keys["optimizer"]["lr"], len(rates) - 1, keys["schedule"].get("factors", [1.0, 1.0])
    assert keys["schedule"]["type"] in ("table", "constant")
    assert keys["run_samples"] == 6 * len(rates)
    ours = [highest * factor_at(factors, step / last) for step in range(len(rates))]
    return ours == pytest.approx(rates, rel=0.002, abs=0.002 * highest)


CALLED = """
from torch.optim.lr_scheduler import *
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
schedule = {made}
for epoch in range(4):
    {before_pass}
    for x, y in train_loader:
        {before_step}
        optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
        {after_step}
    {after_pass}
"""
WARMED_UP = "[LinearLR(optimizer, 0.1, total_iters=8), CosineAnnealingLR(optimizer, 32)]"
NOWHERE = {"before_pass": "", "before_step": "", "after_step": "", "after_pass": ""}


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(
    ("made", "called"),
    [
        ("StepLR(optimizer, 2, 0.1)", {"before_pass": "schedule.step()"}),
        ("StepLR(optimizer, 7, 0.5)", {"before_step": "schedule.step()"}),
        ("OneCycleLR(optimizer, 0.1, total_steps=40)", {"after_step": "schedule.step()"}),
        ("OneCycleLR(optimizer, 0.1, total_steps=4)", {"after_pass": "schedule.step()"}),
        ("LambdaLR(optimizer, lambda n: [1.0, 0.5, 0.1, 0.1][n])", {"after_pass": "if epoch < 3: schedule.step()"}),
        (f"SequentialLR(optimizer, {WARMED_UP}, milestones=[8])", {"after_step": "schedule.step()"}),
        (f"SequentialLR(optimizer, {WARMED_UP}, milestones=[1])", {"after_pass": "schedule.step()"}),
        (f"ChainedScheduler({WARMED_UP})", {"after_step": "schedule.step()"}),
        (f"SequentialLR(optimizer, [ChainedScheduler({WARMED_UP})], [])", {"after_step": "schedule.step()"}),
        ("StepLR(optimizer, 1, 0.5)", {}),
        ("StepLR(optimizer, 1, 0.5)", {"after_pass": "if optimizer is None: schedule.step()"}),
        ("StepLR(optimizer, 1, 0.5)", {"after_pass": "if epoch >= 2: schedule.step()"}),
        ("StepLR(optimizer, 1, 0.5)", {"before_pass": "if epoch % 2 == 1: schedule.step()"}),
        (
            "StepLR(optimizer, 1, 0.5)",
            {"after_pass": "if isinstance(schedule, ReduceLROnPlateau): schedule.step(1.0)\n    else: schedule.step()"},
        ),
        (
            "StepLR(optimizer, 1, 0.5)",
            {
                "before_pass": "def end(one=None):\n        if one is not None: one.step()",
                "after_pass": "end(); end(schedule)",
            },
        ),
        ("StepLR(optimizer, 1, 0.5)", {"after_pass": "for _, one in enumerate([schedule]): one.step()"}),
    ],
    ids=[
        "before each pass",
        "before each step",
        "of as many steps as the run",
        "of as many passes",
        "out of a list",
        "one after the other",
        "of passes",
        "both at once",
        "one in the other",
        "nowhere",
        "where it never comes",
        "after the later passes",
        "before every second pass",
        "by its kind",
        "in a function",
        "out of all schedules",
    ],
)
def test_a_schedule_is_followed_wherever_it_is_called(folder: Path, made: str, called: dict[str, str]) -> None:
    text = CALLED.format_map(NOWHERE | called | {"made": made})
    assert follows(loop := watched(folder, text), text)
    assert settings_of(loop, None).told == () or "OneCycleLR" in made, "of its momentum"


def test_a_cycle_of_a_loader_that_drops_its_last_batch_is_followed(folder: Path) -> None:
    text = (
        "train_loader = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True, drop_last=True)\n"
        + CALLED.format_map(
            NOWHERE | {"made": "OneCycleLR(optimizer, 0.1, total_steps=28)", "after_step": "schedule.step()"}
        )
    )
    keys, rates = keys_of(watched(folder, text)), rates_of_a_whole_run(text)
    ours = [0.1 * factor_at(keys["schedule"]["factors"], step / (len(rates) - 1)) for step in range(len(rates))]
    assert ours == pytest.approx(rates, abs=0.006), "its steps are told by samples, of which it leaves some out"


@pytest.mark.parametrize("drawn", ["num_samples=18", "replacement=True, num_samples=18"])
def test_a_pass_is_as_many_samples_as_its_sampler_draws(folder: Path, drawn: str) -> None:
    loader = f"DataLoader(TensorDataset(X, Y), 6, sampler=torch.utils.data.RandomSampler(X, {drawn}))"
    text = f"train_loader = {loader}\n" + CALLED.format_map(
        NOWHERE | {"made": "StepLR(optimizer, 1, 0.5)", "after_pass": "schedule.step()"}
    )
    loop = watched(folder, text)
    assert follows(loop, text)
    assert settings_of(loop, None).in_steps is False
    assert "draws 18 samples out of 60 for a pass" in settings_of(loop, None).told[0]
    assert len(sets_of(loop)[0].dataset) == 60


def test_a_schedule_of_passes_goes_down_with_their_last_batch_which_is_smaller(folder: Path) -> None:
    text = "train_loader = DataLoader(TensorDataset(X, Y), batch_size=7, shuffle=True)\n" + CALLED.format_map(
        NOWHERE | {"made": "StepLR(optimizer, 1, 0.5)", "after_pass": "schedule.step()"}
    )
    keys, rates = keys_of(watched(folder, text)), rates_of_a_whole_run(text)
    ours = [0.1 * factor_at(keys["schedule"]["factors"], step / (len(rates) - 1)) for step in range(len(rates))]
    assert ours == pytest.approx(rates)


def test_a_schedule_that_ends_before_the_run_is_told(folder: Path) -> None:
    """The script would raise then, or its run is shorter than it is read."""
    text = CALLED.format_map(
        NOWHERE | {"made": "OneCycleLR(optimizer, 0.1, total_steps=30)", "after_step": "schedule.step()"}
    )
    assert "cannot be known in advance" in settings_of(watched(folder, text), None).told[0]


@pytest.mark.parametrize("test", ["float(X.sum()) > -1e9", "optimizer.param_groups[0]['lr'] > 0.03"])
def test_a_schedule_that_is_stepped_where_something_is_true_is_told(folder: Path, test: str) -> None:
    called = {"made": "StepLR(optimizer, 1, 0.5)", "after_pass": f"if {test}: schedule.step()"}
    loop = watched(folder, CALLED.format_map(NOWHERE | called))
    assert "schedule" not in keys_of(loop)
    assert "cannot be known in advance" in settings_of(loop, None).told[0]


IN_ROUNDS = """
def endless(loader):
    while True:
        yield from loader
batches = endless(train_loader)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
{made}
for epoch in range(4):
    {before}
    for {rounds}
        optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
    {after}
"""


@pytest.mark.parametrize(
    "rounds",
    [
        "number in range(15):\n        x, y = next(batches)",
        "number, (x, y) in enumerate(train_loader):\n        if number >= 4: break",
    ],
)
@pytest.mark.parametrize(
    "set_by",
    [
        {"made": "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)", "before": "pass", "after": "schedule.step()"},
        {"made": "", "before": "optimizer.param_groups[0]['lr'] = 0.1 * 0.5 ** epoch", "after": ""},
    ],
    ids=["a schedule", "by hand"],
)  # fmt: skip
def test_a_rate_of_rounds_that_are_no_passes_over_the_data_goes_by_the_rounds(
    folder: Path, rounds: str, set_by: dict[str, str]
) -> None:
    text = IN_ROUNDS.format(rounds=rounds, **set_by)
    assert follows(watched(folder, text), text)


BY_PHASES = """
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
loaders = {"train": train_loader, "val": val_loader}
for epoch in range(4):
    for phase in ["train", "val"]:
        net.train(phase == "train")
        for x, y in loaders[phase]:
            loss = F.cross_entropy(net(x), y)
            if phase == "train":
                optimizer.zero_grad(); loss.backward(); optimizer.step()
        if phase == "train": schedule.step()
"""


def test_a_schedule_is_stepped_once_in_the_phases_of_a_pass(folder: Path) -> None:
    assert follows(watched(folder, BY_PHASES), BY_PHASES)


DAMPENS = """
import contextlib
class Warmup:
    def __init__(self, optimizer):
        self.optimizer, self.last = optimizer, 0
        dampen(self)
    @contextlib.contextmanager
    def dampening(self):
        for group, rate in zip(self.optimizer.param_groups, self.rates): group["lr"] = rate
        yield
        dampen(self)
of_all = []
def dampen(one=None):
    one = one or of_all[0]
    of_all.append(one)
    one.last, one.rates = one.last + 1, [group["lr"] for group in one.optimizer.param_groups]
    for group in one.optimizer.param_groups: group["lr"] *= min(1.0, one.last / 20)
"""


@pytest.mark.parametrize("called", ["with warmup.dampening(): schedule.step()", "schedule.step(); dampens.dampen()"])
def test_a_library_that_changes_the_rate_beside_a_schedule_is_told(folder: Path, called: str) -> None:
    """As pytorch_warmup: a schedule that is carried on from the dampened rate would be that of another run."""
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "dampens.py").write_text(DAMPENS)
    sys.modules.pop("dampens", None)  # it knows the optimizer of the script before
    found = f"import sys; sys.path.append({str(folder / 'site-packages')!r})\nimport dampens\n"
    text = CALLED.format_map(NOWHERE | {"made": "CosineAnnealingLR(optimizer, 40)", "after_step": called})
    loop = watched(folder, found + text.replace("for epoch", "warmup = dampens.Warmup(optimizer)\nfor epoch", 1))
    assert keys_of(loop)["optimizer"]["lr"] == 0.1
    assert "cannot be known in advance" in settings_of(loop, None).told[0]


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("made", ["CosineAnnealingLR(optimizer, 7)", "LambdaLR(optimizer, lambda n: 0.5 ** n)"])
def test_a_run_that_goes_on_from_a_checkpoint_is_followed_from_there_and_told(folder: Path, made: str) -> None:
    text = f"""
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.{made}
        optimizer.step()
        for epoch in range(3): schedule.step()
        was = optimizer.state_dict(), schedule.state_dict()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.{made}
        optimizer.load_state_dict(was[0]); schedule.load_state_dict(was[1])
        for epoch in range(3, 7):
            for x, y in train_loader:
                optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
            schedule.step()
    """.replace("optimizer.step()", "", 1)
    loop = watched(folder, text)
    assert follows(loop, text)
    assert any("went on from a checkpoint" in one for one in settings_of(loop, None).told)


def test_of_two_schedules_that_take_turns_none_is_carried_on(folder: Path) -> None:
    """A warm-up of one's own that is left after the first pass: carried on it would end at a hundred times the rate."""
    text = """
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        by_pass = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3])
        by_step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        for epoch in range(5):
            for x, y in train_loader:
                optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
                if epoch == 0: by_step.step()
            if epoch: by_pass.step()
    """
    loop = watched(folder, text)
    assert keys_of(loop)["optimizer"]["lr"] == 0.1
    assert "cannot be known in advance" in settings_of(loop, None).told[0]


def test_a_rate_that_is_set_beside_a_schedule_of_passes_is_not_carried_on(folder: Path) -> None:
    """A warm-up by hand, whose first group begins above the rate that it was made with; another group was added later."""
    text = """
        optimizer = torch.optim.SGD(net[0].parameters(), lr=0.01)
        optimizer.add_param_group({"params": net[3].parameters(), "weight_decay": 0.1})
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / 30)
        for epoch in range(5):
            for number, (x, y) in enumerate(train_loader):
                if (step := number + 10 * epoch) < 20:
                    for group in optimizer.param_groups: group["lr"] = 0.1 - 0.09 * step / 20
                optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
            schedule.step()
    """
    loop = watched(folder, text)
    assert keys_of(loop)["optimizer"]["lr"] == 0.01
    assert "cannot be known in advance" in settings_of(loop, None).told[0]


SET_BY_HAND = """
def adjust(optimizer, epoch):
    lr = {rate}
    {then}
    for group in optimizer.param_groups: group["lr"] = lr
first = 0.1
optimizer = torch.optim.SGD([{{"params": net[0].parameters()}}, {{"params": net[3].parameters()}}], lr=first)
schedule = {schedule}
for epoch in range(5):
    {by_pass}
    for number, (x, y) in enumerate(train_loader):
        optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
        {by_batch}
"""
BY_HAND = {"rate": "first", "then": "", "schedule": None, "by_pass": "", "by_batch": ""}


def test_a_rate_that_a_function_sets_for_each_pass_keeps_its_shape(folder: Path) -> None:
    keys = keys_of(
        watched(
            folder,
            SET_BY_HAND.format_map(BY_HAND | {"rate": "first * 0.5 ** epoch", "by_pass": "adjust(optimizer, epoch)"}),
        )
    )
    assert keys["schedule"]["type"] == "table"
    for share, factor in ((0.1, 1), (0.3, 0.5), (0.5, 0.25), (0.9, 0.0625)):
        assert factor_at(keys["schedule"]["factors"], share) == pytest.approx(factor, abs=0.02)


@pytest.mark.parametrize(
    "changed",
    [
        {"by_pass": "if epoch: optimizer.param_groups[0]['lr'] *= 0.5"},
        {"schedule": "torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)", "by_batch": "if number % 5 == 4: schedule.step()"},
        {"schedule": "torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: float(n > 9), lambda n: 1.0])", "by_batch": "schedule.step()"},
    ],
    ids=["multiplied", "after_some_batches", "another_for_each_group"],
)  # fmt: skip
def test_a_rate_that_changes_later_in_a_way_that_is_not_seen_is_told(folder: Path, changed: dict[str, str]) -> None:
    loop = watched(folder, SET_BY_HAND.format_map(BY_HAND | changed))
    assert "schedule" not in keys_of(loop)
    assert "cannot be known in advance" in settings_of(loop, None).told[0]


AVERAGED = """
import copy
{made}
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
{before}
for epoch in range(5):
    for x, y in train_loader:
        optimizer.zero_grad()
        {changed}
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        {after}
"""
NOTHING = {"made": "", "before": "", "changed": "", "after": ""}


@pytest.mark.parametrize(
    ("made", "after", "name"),
    [
        ("ema = copy.deepcopy(net)", "for a, b in zip(ema.parameters(), net.parameters()): a.data.lerp_(b.data, 0.1)", "ema"),
        ("kept = torch.optim.swa_utils.AveragedModel(net)", "kept.update_parameters(net)", "kept"),
        ("class AverageMeter:\n    def update(self, x): pass\nlosses = AverageMeter(); schema = {}", "losses.update(1)", None),
    ],
)  # fmt: skip
def test_an_average_of_the_weights_is_told(folder: Path, made: str, after: str, name: str | None) -> None:
    loop = watched(folder, AVERAGED.format_map(NOTHING | {"made": made, "after": after}))
    told = [one for one in settings_of(loop, None).told if "averages its weights" in one]
    assert told == [] if name is None else f"({name})" in told[0]


@pytest.mark.parametrize(
    ("before", "changed", "draws"),
    [
        ("", "", False), ("", "x *= 0.5", False), ("", "x = x + 0.5 * torch.randn_like(x)", True),
        ("import numpy as np; np.random.seed(0)", "x = x * float(np.random.beta(1, 1))", True),
    ],
)  # fmt: skip
def test_a_loss_that_draws_is_told_as_evaluations_take_it_too(
    folder: Path, before: str, changed: str, draws: bool
) -> None:
    watched(folder, AVERAGED.format_map(NOTHING | {"before": before, "changed": changed}))
    said = read(Source("script", "train.py", {"args": []}))
    assert any("draws random numbers" in one for one in said.told) is draws


CONTRASTED = """
class Draws(torch.utils.data.Dataset):  # other samples each time
    def __len__(self): return 60
    def __getitem__(self, place): return X[place] + 3 * torch.randn(8), Y[place]
def contrasted(a, b):
    return F.cross_entropy(F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / TEMPERATURE, torch.arange(len(a)))
optimizer, TEMPERATURE = torch.optim.{optimizer}(net.parameters()), 0.5
for x, y in {loader}:
    view = x + 0.1 * torch.randn_like(x)
    loss = {loss}
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
@pytest.mark.parametrize("temperature", [0.05, 0.5, 5.0])
@pytest.mark.parametrize("other", ["view", "2 * x"])
def test_a_contrastive_loss_is_told_as_one_of_the_whole_batch(
    folder: Path, optimizer: str, temperature: float, other: str
) -> None:
    text = CONTRASTED.format(optimizer=optimizer, loader="train_loader", loss=f"contrasted(net(x), net({other}))")
    watched(folder, text.replace("0.5\n", f"{temperature}\n"))
    with pytest.raises(LossNotSeen, match="its loss is one of the whole batch, as a contrastive one"):
        read(Source("script", "train.py", {"args": []}))


def test_a_mean_whose_samples_weigh_differently_leaves_the_loss_to_be_written(folder: Path) -> None:
    watched(folder, PLAIN.replace("net(x), y)", "net(x), y, weight=torch.tensor([1.0, 2.0, 5.0]))"))
    with pytest.raises(LossNotSeen, match="over what is not clear"):
        read(Source("script", "train.py", {"args": []}))


ONLY_IN_TRAINING = {
    "not in evaluation mode, .*: ValueError: .*; let the model return there": """
        class Aux(nn.Module):
            def __init__(self): super().__init__(); self.net = net
            def forward(self, x): return (self.net(x), self.net(x)) if self.training else self.net(x)
        model = Aux()
        def loss_of(x, y):
            out, aux = model(x)
            return F.cross_entropy(out, y) + 0.4 * F.cross_entropy(aux, y)
    """,
    "not without gradients, .*: RuntimeError: .*; compute it, from the batch on, within": """
        model = net
        def loss_of(x, y):
            x.requires_grad_()
            out = net(x)
            slope, = torch.autograd.grad(out.sum(), x, create_graph=True)
            return F.cross_entropy(out, y) + 0.1 * (slope.norm(dim=1) - 1).pow(2).mean()
    """,
}


@pytest.mark.parametrize("reason", ONLY_IN_TRAINING)
def test_a_loss_that_there_is_in_training_alone_is_refused_with_what_validation_misses(
    folder: Path, reason: str
) -> None:
    loop = """
optimizer = torch.optim.Adam(net.parameters())
for x, y in train_loader:
    optimizer.zero_grad(); loss_of(x, y).backward(); optimizer.step()
"""
    watched(folder, textwrap.dedent(ONLY_IN_TRAINING[reason]) + loop)
    with pytest.raises(LossNotSeen, match=reason):
        read(Source("script", "train.py", {"args": []}))


@pytest.mark.parametrize("loader", ["train_loader", "DataLoader(Draws(), batch_size=6)"])
@pytest.mark.parametrize(
    ("loss", "is_sum"),
    [
        ("F.cross_entropy(net(x), y)", False), ("F.mse_loss(net(view), net(x))", False),
        ("F.cross_entropy(net(view), y) * float(torch.rand(()))", False),
        ("F.cross_entropy(net(x), y, reduction='sum')", True), ("F.mse_loss(net(view), net(x), reduction='sum')", True),
        ("3 + F.cross_entropy(net(view), y, reduction='sum')", True),
    ],
)  # fmt: skip
def test_a_sum_over_the_batch_is_told_from_a_mean(folder: Path, loader: str, loss: str, is_sum: bool) -> None:
    watched(folder, CONTRASTED.format(optimizer="Adam", loader=loader, loss=loss))
    said = read(Source("script", "train.py", {"args": []}))
    assert any("its loss is a sum over the batch" in one for one in said.told) is is_sum


@pytest.mark.parametrize(
    ("before", "allowed"), [("", None), ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", True)]
)
def test_tf32_is_the_scripts(folder: Path, before: str, allowed: bool | None) -> None:
    was = torch.backends.cuda.matmul.fp32_precision
    try:
        assert keys_of(watched(folder, AVERAGED.format_map(NOTHING | {"before": before}))).get("allow_tf32") is allowed
    finally:
        torch.backends.cuda.matmul.fp32_precision = was


STEPS_OF_ITS_OWN = """
import math
total, warm, cosine, step, known, decay = 50, 8, False, 0, [], 1.0
class Clock:
    now = 0
    def tick(self): self.now += 9
clock, flags = Clock(), argparse.Namespace(lr=0.1)
lr_of = lambda n: 0.1 * (1 - n / total)
def warm_up(optimizer, step, total):
    if step < warm:
        lr = 0.1 * (step + 1) / warm
    else:
        lr = 0.05 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr
def down(optimizer, epoch):
    for group in optimizer.param_groups: group["lr"] = 0.1 * 0.5 * (1 + math.cos(math.pi * epoch / 5))
def stairs(optimizer, epoch):
    lr = flags.lr * 0.1 ** (epoch // 3)
    if epoch > 3: lr *= 0.5
    for group in optimizer.param_groups: group["lr"] = lr
def table(optimizer, epoch):
    rates = {{0: 0.1, 2: 0.05}} if cosine else {{2: 0.05, 3: 0.01}}
    if epoch in rates.keys():
        for group in optimizer.param_groups: group["lr"] = rates[epoch]
        print("the rate is {{}} now".format(rates.get(epoch)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(5):
    {by_pass}
    for number, (x, y) in enumerate(train_loader):
        {by_batch}
        optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
        {after_batch}
    {after_pass}
"""
AT_NO_TIME = {"by_pass": "pass", "by_batch": "pass", "after_batch": "pass", "after_pass": "pass"}
SET_RATE = "optimizer.param_groups[0]['lr'] ="


@pytest.mark.parametrize(
    "when",
    [
        {"by_batch": "lr = warm_up(optimizer, step, total)", "after_batch": "step += 1"},
        {"by_batch": "step += 1; lr = warm_up(optimizer, step, total)"},
        {"by_batch": "lr = warm_up(optimizer, step, total); step += 1"},
        {"after_batch": "step += 1; warm_up(optimizer, step, total)"},
        {"after_batch": "warm_up(optimizer, step, total); step += 1"},
        {"by_batch": f"{SET_RATE} lr_of(number + epoch * len(train_loader))"},
        {"by_batch": f"{SET_RATE} lr_of(step)", "after_pass": "step += 10"},
        {"by_pass": "if cosine: down(optimizer, epoch)\n    else: stairs(optimizer, epoch)"},
        {"by_pass": "lr = stairs(optimizer, epoch)"},
        {"by_pass": "(down if cosine else stairs)(optimizer, epoch)"},
        {"by_pass": "stairs(optimizer, epoch + 1)"},
        {"after_pass": "stairs(optimizer, epoch + 1)"},
        {"by_pass": "lr = [0.1, 0.1, 0.05, 0.02, 0.01][epoch]; print(lr)\n    for group in optimizer.param_groups: group['lr'] = lr"},
        {"by_pass": "table(optimizer, epoch)"},
        {"after_pass": "table(optimizer, epoch + 1)"},
        {"by_pass": "if epoch: optimizer.param_groups[0]['lr'] *= 0.5"},
        {"after_pass": "if epoch in (1, 3):\n        for group in optimizer.param_groups: group['lr'] *= 0.1"},
        {"by_batch": "for group in optimizer.param_groups: group['lr'] *= 0.97"},
        {"after_batch": f"decay *= 0.95; {SET_RATE} 0.1 * decay"},
        {"by_batch": f"decay *= 0.95; {SET_RATE} 0.1 * decay"},
        {"by_pass": "rate = 0.1 if epoch < 1 else 0.9 * rate\n    optimizer.param_groups[0]['lr'] = rate"},
        {"after_pass": f"{SET_RATE} max(0.02, 0.5 * optimizer.param_groups[0]['lr'])"},
        {"by_batch": f"if step > 20: {SET_RATE} 0.98 * optimizer.param_groups[0]['lr']", "after_batch": "step += 1"},
        {"by_pass": "if epoch in (2, 4):\n        for i, p in enumerate(optimizer.param_groups): p['lr'] *= 0.1"},
        {"by_pass": "for p, lr in zip(optimizer.param_groups, [0.1 * 0.5 ** epoch]): p['lr'] = lr"},
    ],
)  # fmt: skip
def test_a_rate_that_the_script_sets_itself_is_the_one_of_each_step(folder: Path, when: dict[str, str]) -> None:
    text = STEPS_OF_ITS_OWN.format_map(AT_NO_TIME | when)
    assert follows(watched(folder, text), text)


@pytest.mark.parametrize(
    "when",
    [
        {"by_batch": "if step < warm: warm_up(optimizer, step, total)", "after_batch": "step += 1"},
        {"by_pass": "stairs(optimizer, epoch)", "by_batch": "if epoch < 1: warm_up(optimizer, number, total)"},
        {"by_pass": "if epoch > 2: optimizer.param_groups[0]['lr'] = 0.01"},
        {"by_pass": f"{SET_RATE} lr_of(step)", "after_pass": "step = 2 * step + 1"},
        {"by_batch": f"{SET_RATE} lr_of(step)", "after_batch": "step = step + 1 if epoch < 1 else 0"},
        {"by_pass": f"decay *= 0.9; {SET_RATE} 0.1 * decay", "after_pass": "decay -= 0.01"},
        {"by_batch": f"decay *= 0.99; {SET_RATE} 0.1 * decay", "after_pass": "decay = 1.0"},
        {"after_pass": "flags.lr *= 0.9; optimizer.param_groups[0]['lr'] = flags.lr"},
        {"by_batch": "if number % 2: optimizer.param_groups[0]['lr'] *= 0.9"},
        {"by_pass": f"known.append(1); {SET_RATE} 0.1 / len(known)"},
        {"by_pass": f"{SET_RATE} lr_of(clock.now)", "after_pass": "clock.tick()"},
        {"by_pass": "optimizer.param_groups[0].update(lr=0.1 / (1 + epoch))"},
        {"by_pass": "{0: stairs, 1: down}[cosine](optimizer, epoch)"},
        {"by_pass": "(lambda: stairs(optimizer, epoch))()"},
        {"by_pass": "them = optimizer.param_groups\n    if epoch > 2:\n        for p in them: p['lr'] = 0.01"},
        {"by_pass": "first = optimizer.param_groups[0]\n    if epoch > 2: first['lr'] = 0.01"},
    ],
)  # fmt: skip
def test_a_rate_is_followed_exactly_or_told(folder: Path, when: dict[str, str]) -> None:
    text = STEPS_OF_ITS_OWN.format_map(AT_NO_TIME | when)
    loop = watched(folder, text)
    if "schedule" in keys_of(loop):
        assert follows(loop, text)
    else:
        assert "cannot be known in advance" in settings_of(loop, None).told[0]


OWN_SCHEDULE = """
class Schedule:
    def __init__(self, optimizer): self.optimizer = optimizer
    def step(self, epoch): self._apply(0.1 * 0.5 ** epoch)
    def _apply(self, rate):
        for group in self.optimizer.param_groups: group["lr"] = rate
"""
OF_A_MODULE = """
def set_lr(optimizer, rate):
    for group in optimizer.param_groups: group["lr"] = rate
def adjust(optimizer, epoch): set_lr(optimizer, 0.1 * 0.5 ** epoch)
"""


@pytest.mark.parametrize(
    ("module", "schedule", "step"),
    [("", "Schedule(optimizer)", "schedule.step(epoch + 1)"), ("rates_of_its_own", "None", "rates_of_its_own.adjust(optimizer, epoch + 1)"),
     ("site-packages/other", "other.Schedule(optimizer)", "schedule.step(epoch + 1)")],
    ids=["a class", "a module", "a library"],
)  # fmt: skip
def test_a_schedule_that_is_none_of_torchs_is_followed_if_it_is_the_scripts_and_else_told(
    folder: Path, module: str, schedule: str, step: str
) -> None:
    (folder / "site-packages").mkdir()
    (folder / "rates_of_its_own.py").write_text(OF_A_MODULE)
    (folder / "site-packages" / "other.py").write_text(OWN_SCHEDULE)
    found = (
        f"import sys; sys.path.append({str(folder / 'site-packages')!r})\nimport {module.rpartition('/')[2]}\n"
        if module
        else OWN_SCHEDULE
    )
    text = (
        found + SET_BY_HAND.format_map(BY_HAND | {"schedule": schedule}).replace("\n    \n", "\n", 1) + f"    {step}\n"
    )
    loop = watched(folder, text)
    if "other" not in module:
        assert follows(loop, text)
    else:
        assert "cannot be known in advance" in settings_of(loop, None).told[0]


@pytest.mark.parametrize(
    "changed",
    [
        {"by_pass": "pass"},
        {"by_pass": "log = {}; log['lr'] = optimizer.param_groups[0]['lr']"},
        {"by_batch": "metrics = {}; metrics['lr'] = first"},
        {"rate": "first", "by_batch": "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)"},
    ],
)
def test_a_rate_that_is_set_before_the_run_or_logged_in_it_is_constant(folder: Path, changed: dict[str, str]) -> None:
    text = SET_BY_HAND.format_map(BY_HAND | changed).replace("for epoch", "adjust(optimizer, 0)\nfor epoch", 1)
    assert keys_of(watched(folder, text))["schedule"] == {"type": "constant"}


STATEFUL = """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.kept = net, None
    def reset(self): self.kept = None
    def new(self, number): return torch.zeros(number, 3)
    def forward(self, x):
        self.kept = self.net(x) + (0.5 * self.kept if self.kept is not None else 0.0)
        return self.kept
cell = Cell()
optimizer = torch.optim.AdamW(cell.parameters(), lr=0.01)
for epoch in range(5):
    for x, y in train_loader:
        optimizer.zero_grad()
        {before}
        F.cross_entropy(cell(x) + cell(x), y).backward()
        optimizer.step()
        {after}
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("cell.kept = cell.new(len(x))", ""),
        ("", "cell.reset()"),
        ("", "for part in cell.modules():\n            if hasattr(part, 'reset'): part.reset()"),
    ],
)
def test_a_state_that_a_module_keeps_is_reset_for_each_batch_as_the_script_does(
    folder: Path, before: str, after: str
) -> None:
    loop = watched(folder, STATEFUL.format(before=before, after=after))
    model, batches = model_of(loop).eval(), list(sets_of(loop)[0])
    alone = [model_of(script.made(script="train.py")).eval()(batch).item() for batch in batches[:2]]
    assert [model(batch).item() for batch in batches[:2]] == pytest.approx(alone)


def test_a_state_that_is_cut_off_but_never_reset_leaves_the_loss_to_be_written(folder: Path) -> None:
    with pytest.raises(LossNotSeen, match="keep a state from one batch to the next"):
        watched(folder, STATEFUL.format(before="", after="cell.kept = cell.kept.detach()"))


TOGETHER = """
first, second = torch.optim.Adam(net[0].parameters(), lr=0.01), torch.optim.Adam(net[3].parameters(), lr=0.02, weight_decay=0.0)
schedules = [{schedules}]
for epoch in range(5):
    for x, y in train_loader:
        first.zero_grad(); second.zero_grad()
        F.cross_entropy(net(x), y).backward()
        first.step(); second.step()
        for one in schedules: one.step()
"""
LINEAR = "torch.optim.lr_scheduler.LinearLR({of}, 1.0, {to}, 50)"


def test_optimizers_of_one_class_that_step_together_are_one_with_the_groups_of_all(folder: Path) -> None:
    both = ", ".join(LINEAR.format(of=one, to=0.1) for one in ("first", "second"))
    loop = watched(folder, TOGETHER.format(schedules=both))
    keys = keys_of(loop)
    assert (keys["optimizer"]["lr"], keys["optimizer"]["reference_batch_size"], keys["run_samples"]) == (0.01, 6, 300)
    assert keys["schedule"] != {"type": "constant"}
    assert any("2 optimizers step together" in one for one in settings_of(loop, None).told)
    model = model_of(loop)
    found = param_groups(model)
    assert [group["lr"] for group in found] == [0.01, 0.02]
    assert {id(p) for group in found for p in group["params"]} == {id(p) for p in model.parameters()}


def test_a_schedule_that_depends_on_the_loss_is_told_and_not_guessed(folder: Path) -> None:
    text = SCHEDULED.format(
        made="torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)", by_step="", by_pass="schedule.step(1.0)"
    )
    loop = watched(folder, text)
    assert "schedule" not in keys_of(loop)
    assert any("cannot be known in advance" in one for one in settings_of(loop, None).told)


FORMS = {
    "class": """
        class Trainer:
            def __init__(self):
                self.model, self.loader, self.valid_loader = net, train_loader, val_loader
                self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
            def fit(self, epochs):
                for self.epoch in range(epochs):
                    for batch in self.loader:
                        self.loss = self.compute(batch)
                        self.optimizer.zero_grad()
                        self.loss.backward()
                        self.optimizer.step()
            def compute(self, batch):
                return F.cross_entropy(self.model(batch[0]), batch[1])
        Trainer().fit(5)
    """,
    "a function of the batch": """
        def train_step(model, optimizer, x, y):
            optimizer.zero_grad()
            loss = nn.CrossEntropyLoss()(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.item()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for epoch in range(5):
            for x, y in train_loader:
                train_step(net, optimizer, x, y)
    """,
    "next": """
        def endless(loader):
            while True:
                yield from loader
        optimizer, batches = torch.optim.AdamW(net.parameters(), lr=0.01), endless(train_loader)
        for step in range(50):
            x, y = next(batches)
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
    """,
    "next, and again from the beginning": """
        optimizer, batches = torch.optim.AdamW(net.parameters(), lr=0.01), iter(train_loader)
        for step in range(50):
            try:
                x, y = next(batches)
            except StopIteration:
                batches = iter(train_loader)
                x, y = next(batches)
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
    """,
    "closure": """
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for epoch in range(5):
            for x, y in train_loader:
                def closure():
                    optimizer.zero_grad()
                    loss = F.cross_entropy(net(x), y)
                    loss.backward()
                    return loss
                optimizer.step(closure)
    """,
    "method of the model": """
        class Whole(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.shift = net, nn.Parameter(torch.zeros(3))
            def loss(self, x, y):
                return F.cross_entropy(self.net(x) + self.shift, y)
        whole = Whole()
        optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
        for epoch in range(5):
            for x, y in train_loader:
                optimizer.zero_grad(); whole.loss(x, y).backward(); optimizer.step()
    """,
    "two modules": """
        head = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW([*net.parameters(), *head.parameters()], lr=0.01)
        for epoch in range(5):
            for x, y in train_loader:
                optimizer.zero_grad(); F.cross_entropy(head(net(x)), y).backward(); optimizer.step()
    """,
    "autocast and a scaler": """
        scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=8.0)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for epoch in range(5):
            for x, y in train_loader:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = F.cross_entropy(net(x), y)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 2.0)
                scaler.step(optimizer); scaler.update()
    """,
    "a loader of its own around another": """
        class Normalizing:
            def __init__(self, loader):
                self.loader = loader
            def __iter__(self):
                ahead = None
                for x, y in self.loader:
                    if ahead is not None: yield ahead
                    ahead = x.sub(0.5).div(2.0), y
                yield ahead
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        train_loader, val_loader = Normalizing(train_loader), Normalizing(val_loader)
        for epoch in range(5):
            for number, (x, y) in enumerate(train_loader):
                optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
    """,
    "functions of the step, which divide by the micro-batches": """
        optimizer, accum_steps = torch.optim.AdamW(net.parameters(), lr=0.01), 1
        for epoch in range(5):
            for number, (x, y) in enumerate(train_loader):
                if number >= 10:
                    accum_steps = 10 % accum_steps
                def forward():
                    loss = F.cross_entropy(net(x), y)
                    if accum_steps > 1:
                        loss = loss / accum_steps
                    return loss
                def backward(its_loss):
                    its_loss.backward()
                    optimizer.step()
                loss = forward(); backward(loss)
                optimizer.zero_grad()
    """,
    "by cases": """
        optimizer, kind = torch.optim.AdamW(net.parameters(), lr=0.01), "classes"
        for epoch in range(5):
            for x, y in train_loader:
                if kind == "numbers":
                    loss = F.mse_loss(net(x), F.one_hot(y, 3).float())
                elif kind == "classes":
                    loss = F.cross_entropy(net(x), y, reduction="none")
                    loss = loss.mean()
                optimizer.zero_grad(); loss.backward(); optimizer.step()
    """,
    "the batch's number is handed on and printed": """
        def loss_of(number, epoch, step, x, y):
            if number == epoch == 0:
                print("first batch", x.shape, step)
            x.div_(2)
            return F.cross_entropy(net(x), y)
        optimizer, step = torch.optim.AdamW(net.parameters(), lr=0.01), 0
        for epoch in range(5):
            for number, (x, y) in enumerate(train_loader):
                loss = loss_of(number, epoch, step, x, y)
                optimizer.zero_grad(); loss.backward(); optimizer.step()
                step += 1
    """,
    "in place": """
        optimizer, seen, mean = torch.optim.AdamW(net.parameters(), lr=0.01), torch.zeros(8), torch.zeros(8)
        for epoch in range(5):
            for x, y in train_loader:
                seen.mul_(0.9).add_(x.mean(0))
                x.sub_(0.5).div_(2.0)
                x[:, 0].zero_()
                x -= 0.1
                out = net(x)
                out.mul_(3.0)
                optimizer.zero_grad(); F.cross_entropy(out, y).backward(); optimizer.step()
                mean.lerp_(x.mean(0), 0.1)
    """,
    "the loss in several lines": """
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for epoch in range(5):
            for number, batch in enumerate(train_loader):
                parts = []
                x, y = batch
                out = net(x)
                if out.shape[0] > 2:
                    weight = 1.0
                else:
                    weight = 2.0
                parts.append(F.cross_entropy(out, y))
                loss = sum(parts) * weight
                loss += 0.01 * out.pow(2).mean()
                print(loss.item())
                optimizer.zero_grad(); loss.backward(); optimizer.step()
    """,
}


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_of_a_batch_is_had_from_loops_of_every_form(folder: Path, form: str) -> None:
    loop = watched(folder, FORMS[form])
    keys = keys_of(loop)
    assert keys["optimizer"]["reference_batch_size"] == 6
    assert keys["run_samples"] == 300
    model, (train, val) = model_of(loop), sets_of(loop)
    assert len(val.dataset) == 20
    model(next(iter(train))).backward()
    grouped = {id(p) for group in param_groups(model) for p in group["params"]}
    assert grouped == {id(p) for p in model.parameters()}
    assert all(p.grad is not None for p in model.parameters())


GET_BATCH = """
data = {"train": torch.arange(400) % 7, "val": torch.arange(200) % 7}
def get_batch(split):
    starts = torch.randint(len(data[split]) - 9, (5,))
    rows = torch.stack([data[split][i : i + 9] for i in starts])
    return rows[:, :8], rows[:, 1:]
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 8), nn.Linear(8, 7)
    def forward(self, x, y):
        logits = self.out(self.embed(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())
model = LM()
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}], lr=0.01, betas=(0.9, 0.95))
iteration, accumulate, most = 0, 2, 40
x, y = get_batch("train")
while True:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * min(1.0, (iteration + 1) / 10)
    if iteration == 0:
        with torch.no_grad():
            print("val", model(*get_batch("val"))[1].item())
    for micro_step in range(accumulate):
        logits, loss = model(x, y)
        loss = loss / accumulate
        x, y = get_batch("train")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iteration += 1
    if iteration > most:
        break
"""


def test_a_loop_over_a_single_micro_batch_is_no_length(folder: Path) -> None:
    assert (
        keys_of(watched(folder, GET_BATCH.replace("40, 2", "40, 1").replace("0, 2, 40", "0, 1, 40")))["run_samples"]
        == 200
    )


def test_batches_of_a_call_become_a_stream_of_their_rows(folder: Path) -> None:
    loop = watched(folder, GET_BATCH)
    keys = keys_of(loop)
    recipe = {"lr": 0.01, "weight_decay": 0.2, "max_gradient_norm": 1.0, "reference_batch_size": 10}
    assert recipe.items() <= keys["optimizer"].items(), (
        "the rate that the optimizer was made with, not one of its warm-up"
    )
    assert keys["run_samples"] == 400
    model, (train, val) = model_of(loop), sets_of(loop)
    x, y = next(iter(train))
    assert (x.shape, y.shape) == ((8,), (8,))
    assert model([x[None], y[None]]).item() == pytest.approx(model.inner(x[None], y[None])[1].item())
    assert [group.get("weight_decay") for group in param_groups(model)] == [None, 0.0]
    assert next(iter(val))[0].shape == (8,)


DISTRIBUTED = """
import os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler
rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl")
assert dist.is_initialized() and dist.get_world_size() == 1
model = DDP(net, device_ids=[rank])
sampler = DistributedSampler(train_loader.dataset)
loader = DataLoader(train_loader.dataset, batch_size=6, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("environment", [{}, {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}])
def test_a_script_for_several_processes_is_watched_as_one(
    folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    loop = watched(folder, DISTRIBUTED)
    assert keys_of(loop)["run_samples"] == 300
    assert isinstance(model_of(loop).inner, nn.Sequential), "what wraps the module is the study's own"
    assert not torch.distributed.is_initialized()


WITHIN = """
train_data, val_data = torch.randn(90, 8), torch.randn(40, 8)
def get_batch(data):
    picked = torch.randint(len(data), (5,))
    return data[picked], data[picked] * 2
class Doubles(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x, y):
        return None, F.mse_loss(self.linear(x), y)
model = Doubles()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(30):
    _, loss = model(*get_batch(train_data))
    (loss / 1).backward()
    optimizer.step()
"""


ITERATED = """
def batches_of(size, x, y):
    for rows in torch.randperm(len(x)).split(size):
        yield x[rows], y[rows]
class Batches:
    def __init__(self, x, y): self.x, self.y, self.place = x, y, 0
    def __iter__(self): return self
    def __next__(self):
        if self.place >= len(self.x):
            self.place = 0
            raise StopIteration
        self.place += 6
        return (self.x[self.place - 6:self.place], torch.ones(6)), self.y[self.place - 6:self.place]
train_iter, dev_iter = Batches(X, Y), Batches(X[:24], Y[:24])
optimizer = torch.optim.Adam(net.parameters())
for epoch in range(5):
    for LOOP:
        optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
"""


@pytest.mark.parametrize(
    ("loop", "tells"),
    [
        ("x, y in batches_of(6, X, Y)", True),
        ("i, ((x, weight), y) in enumerate(train_iter)", False),
        ("x, y in [(X[i : i + 6], Y[i : i + 6]) for i in range(0, 60, 6)]", True),
    ],
)
def test_batches_of_no_loader_become_a_stream_of_their_rows(folder: Path, loop: str, tells: bool) -> None:
    found = watched(folder, ITERATED.replace("LOOP", loop))
    assert keys_of(found)["optimizer"]["reference_batch_size"] == 6
    told = " ".join(settings_of(found, None).told)
    assert ("fresh batches of the training data are evaluated" in told) is tells
    train, _ = sets_of(found)
    samples = [sample for _, sample in zip(range(90), train, strict=False)]
    assert len(samples) == 90, "the first again after the last"
    torch.manual_seed(0)
    first = next(iter(train))
    torch.manual_seed(0)
    torch.testing.assert_close(next(iter(train)), first, msg="begun again, it is the same")
    model_of(found)(torch.utils.data.default_collate(samples[:4])).backward()


def test_batches_that_are_dictionaries_of_tables_are_rows_too(folder: Path) -> None:
    found = watched(
        folder,
        """
        def batches_of(table, size):
            for rows in torch.arange(len(table["x"])).split(size):
                yield {name: values[rows] for name, values in table.items()}
        def outputs(batch):
            extra = batch.get("more")
            return net(batch["x"]) if extra is None else net(torch.column_stack([batch["x"], extra]), batch.get("y"))
        data = {"train": {"x": X, "y": Y}, "val": {"x": X[:24], "y": Y[:24]}}
        optimizer = torch.optim.Adam(net.parameters())
        for epoch in range(5):
            for batch in batches_of(data["train"], 6):
                optimizer.zero_grad(); F.cross_entropy(outputs(batch), batch["y"]).backward(); optimizer.step()
        """,
    )
    train, val = sets_of(found)
    samples = [sample for _, sample in zip(range(6), train, strict=False)]
    assert all(set(sample) == {"x", "y"} for sample in samples)
    assert len({float(sample["x"].sum()) for _, sample in zip(range(60), val, strict=False)}) <= 24, "of val"
    model_of(found)(torch.utils.data.default_collate(samples)).backward()


def test_a_function_before_the_loop_is_none_of_its_statements(folder: Path) -> None:
    """It calls the model with names of its own, and in a branch that never ran with more than the model was called with."""
    with pytest.raises(ValueError, match="no loop was found"):
        watched(
            folder,
            """
            class Batch:
                def __init__(self, x, y): self.x, self.y, self.more = x, y, None
            def outputs(batch):
                if batch.more is None:
                    return net(batch.x)
                return net(torch.column_stack([batch.x, batch.more]), torch.column_stack([batch.y]))
            optimizer = torch.optim.Adam(net.parameters())
            for one in [Batch(X[i : i + 6], Y[i : i + 6]) for i in range(0, 60, 6)]:
                optimizer.zero_grad(); F.cross_entropy(outputs(one), one.y).backward(); optimizer.step()
            """,
        )


def test_the_loop_may_be_a_librarys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of ignite, poutyne and others: the script hands model, loss and loader over."""
    library = folder / "site-packages"
    library.mkdir()
    text = """
        def fit(model, optimizer, criterion, loader, passes):
            for _ in range(passes):
                for batch in loader:
                    step(model, optimizer, criterion, batch)
        def step(model, optimizer, criterion, batch):
            x, y = batch
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
    """
    (library / "fits.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(library))
    loop = watched(
        folder, "import fits\nfits.fit(net, torch.optim.Adam(net.parameters()), nn.CrossEntropyLoss(), train_loader, 5)"
    )
    assert keys_of(loop)["optimizer"]["reference_batch_size"] == 6
    train, val = sets_of(loop)
    assert (len(train.dataset), len(val.dataset)) == (60, 20)
    model_of(loop)(next(iter(train))).backward()


def test_a_batch_that_is_made_within_the_call_of_the_model_is_found(folder: Path) -> None:
    loop = watched(folder, WITHIN)
    assert keys_of(loop)["run_samples"] == 150
    train, val = (next(iter(one)) for one in sets_of(loop))
    assert torch.equal(train[0] * 2, train[1])
    data = loop.loss.place.global_
    assert any(torch.equal(train[0], row) for row in data["train_data"])
    assert any(torch.equal(val[0], row) for row in data["val_data"]), "the same call of val_data"


OWN_OPTIMIZER = """
import torch
class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1): super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]: p.sub_(p.grad.sign(), alpha=group["lr"])
"""
WITH_SIGNS = PLAIN.replace("torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)", "Signs(net.parameters())")


def test_an_optimizer_of_a_module_beside_the_script_is_found_by_its_name(folder: Path) -> None:
    (folder / "signs_beside.py").write_text(OWN_OPTIMIZER)
    target = keys_of(watched(folder, f"from signs_beside import Signs\n{WITH_SIGNS}"))["optimizer"]["target"]
    assert resolve(target).__name__ == "Signs"


SIAMESE = """
        import copy
        class Siamese(nn.Module):
            def __init__(self):
                super().__init__()
                self.online, self.predict, self.target = net, nn.Linear(3, 3), copy.deepcopy(net)
            def forward(self, x, y=None):
                with torch.no_grad(): aim = F.one_hot(y, 3).float() if y is not None else self.target(x)
                return F.mse_loss(self.predict(self.online(x)), aim)
            @torch.no_grad()
            def move(self):
                for p, q in zip(self.target.parameters(), self.online.parameters()): p.lerp_(q, 0.1)
        model = Siamese()
        optimizer = torch.optim.Adam([*model.online.parameters(), *model.predict.parameters()])
"""
REFUSED = {
    "move it into a module of its own": OWN_OPTIMIZER + WITH_SIGNS,
    "two optimizers take turns": """
        other = nn.Linear(8, 1)
        first, second = torch.optim.Adam(net.parameters()), torch.optim.Adam(other.parameters())
        for x, y in train_loader:
            F.cross_entropy(net(x), y).backward(); first.step()
            other(x).mean().backward(); second.step()
    """,
    "L-BFGS": """
        optimizer = torch.optim.LBFGS(net.parameters())
        def closure():
            loss = F.cross_entropy(net(X), Y)
            loss.backward()
            return loss
        for epoch in range(3):
            optimizer.step(closure)
    """,
    "no optimizer of torch was made": """
        for x, y in train_loader:
            F.cross_entropy(net(x), y).backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.1 * p.grad
    """,
    "clip_grad_value_": """
        optimizer = torch.optim.Adam(net.parameters())
        for x, y in train_loader:
            F.cross_entropy(net(x), y).backward()
            torch.nn.utils.clip_grad_value_(net.parameters(), 1e-3)
            optimizer.step()
    """,
    "reads hidden, which the step before has left": """
        rnn, head = nn.GRU(8, 4), nn.Linear(4, 3)
        optimizer, hidden = torch.optim.Adam([*rnn.parameters(), *head.parameters()]), torch.zeros(1, 4)
        for x, y in train_loader:
            hidden = hidden.detach()
            out, hidden = rnn(x, hidden)
            F.cross_entropy(head(out), y).backward()
            optimizer.step()
    """,
    "raised ZeroDivisionError": "1 / 0",
    "reads the batches of 2 loaders .x, y and u.": """
        others = DataLoader(TensorDataset(torch.randn(90, 8)), batch_size=9, shuffle=True)
        optimizer = torch.optim.Adam(net.parameters())
        for (x, y), (u,) in zip(train_loader, others):
            (F.cross_entropy(net(x), y) + net(u).pow(2).mean()).backward(); optimizer.step()
    """,
    "reads the batches of 2 loaders .x, y and u, v.": """
        others = DataLoader(TensorDataset(torch.randn(60, 8), torch.randn(60, 3)), batch_size=6, shuffle=True)
        optimizer = torch.optim.Adam(net.parameters())
        for (x, y), (u, v) in zip(train_loader, others):
            (F.cross_entropy(net(x), y) + F.mse_loss(net(u), v)).backward(); optimizer.step()
    """,
    "fetches a batch besides its own .next.others..": """
        import itertools
        others = itertools.cycle(DataLoader(torch.ones(90, 8), batch_size=9))
        optimizer = torch.optim.Adam(net.parameters())
        for x, y in train_loader:
            u = 2 * next(others)
            (F.cross_entropy(net(x), y) + net(u).pow(2).mean()).backward(); optimizer.step()
    """,
    "reads [ac], which is another in later batches": """
        others = DataLoader(torch.randn(60, 8), batch_size=6, shuffle=True)
        optimizer = torch.optim.Adam(net.parameters())
        def step(a, b, c):
            (F.cross_entropy(net(a), b) + net(c).pow(2).mean()).backward(); optimizer.step()
        for (x, y), u in zip(train_loader, others): step(x + 1, y, u + 1)
    """,
    "reads step, which is another in later batches": """
        optimizer, step = torch.optim.Adam(net.parameters()), 0
        for x, y in train_loader:
            loss = F.cross_entropy(net(x), y) + min(1.0, step / 100) * net(x).pow(2).mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            step += 1
    """,
    "reads number, which is another in later batches": """
        optimizer = torch.optim.Adam(net.parameters())
        for number, (x, y) in enumerate(train_loader):
            loss = F.cross_entropy(net(x), y) * (2.0 if number % 10 == 9 else 1.0)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
    """,
    "reads weights, which is another in later batches": """
        optimizer, weights = torch.optim.Adam(net.parameters()), torch.ones(3)
        for epoch in range(5):
            for x, y in train_loader:
                loss = F.cross_entropy(net(x), y, weight=weights)
                optimizer.zero_grad(); loss.backward(); optimizer.step()
                weights.copy_(torch.softmax(net(x).detach().mean(0), 0))
    """,
    "reads seen, which is another in later batches": """
        optimizer, seen = torch.optim.Adam(net.parameters()), torch.zeros(8)
        for x, y in train_loader:
            seen.mul_(0.9).add_(x.mean(0))
            optimizer.zero_grad(); F.cross_entropy(net(x - seen), y).backward(); optimizer.step()
    """,
    "reads i, which is another in later batches": """
        optimizer = torch.optim.Adam(net.parameters())
        for epoch in range(5):
            for i in range(0, len(X) - 6, 6):  # of the next row, too: no row alone is a sample
                optimizer.zero_grad(); F.cross_entropy(net(X[i:i+6]), Y[i+1:i+7]).backward(); optimizer.step()
    """,
    "reads teacher, a module of the same shape": """
        import copy
        teacher = copy.deepcopy(net).eval()
        optimizer = torch.optim.Adam(net.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
        for x, y in train_loader:
            loss = F.cross_entropy(net(x), y) + F.mse_loss(net(x), teacher(x).detach())
            optimizer.zero_grad(); loss.backward(); optimizer.step(); schedule.step()
            with torch.no_grad():
                for p, q in zip(teacher.parameters(), net.parameters()): p.lerp_(q, 0.01)
    """,
    "1 parameters that are in no module": """
        scale = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.Adam([*net.parameters(), scale], lr=0.0)
        for x, y in train_loader:
            optimizer.zero_grad(); F.cross_entropy(net(x) * scale, y).backward(); optimizer.step()
    """,
    "was called in training mode": """
        net.eval()
        optimizer = torch.optim.Adam(net.parameters())
        for x, y in train_loader:
            optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
    """,
    "calls backward at several places": """
        optimizer = torch.optim.Adam(net.parameters())
        for x, y in train_loader:
            out = net(x)
            F.cross_entropy(out, y).backward(retain_graph=True)
            out.pow(2).mean().backward()
            optimizer.step(); optimizer.zero_grad()
    """,
    "another optimizer .Adam. has other parameters": """
        other = nn.Linear(8, 8)
        first, second = torch.optim.Adam(net.parameters()), torch.optim.Adam(other.parameters())
        for number, (x, y) in enumerate(train_loader):
            first.zero_grad(); net(other(x).detach()).mean().backward(); first.step()
            if number % 5 == 4:
                second.zero_grad(); net(other(x)).mean().backward(); second.step()
    """,
    "do not go up and down together": TOGETHER.format(schedules=LINEAR.format(of="first", to=0.1)),
    "step together": """
        first, second = torch.optim.Adam(net[0].parameters()), torch.optim.SGD(net[3].parameters(), lr=0.1)
        for x, y in train_loader:
            F.cross_entropy(net(x), y).backward(); first.step(); second.step()
    """,
    "the same data in every step .a whole graph": """
        near, known = (torch.rand(60, 60) > 0.9).float(), torch.arange(60) < 20
        optimizer = torch.optim.Adam(net.parameters())
        def train():
            optimizer.zero_grad()
            F.cross_entropy((near @ net(X))[known], Y[known]).backward()
            optimizer.step()
        for epoch in range(5): train()
    """,
    "the same data in every step .a whole graph, or": """
        class Graph:
            nodes = next(iter(DataLoader(X, batch_size=60)))  # a loader that only puts it together
        class Whole(nn.Module):
            def __init__(self): super().__init__(); self.net = net
            def forward(self, graph): return self.net(graph.nodes)
        whole, graph, wanted = Whole(), Graph(), F.one_hot(Y, 3).float()
        optimizer = torch.optim.Adam(whole.parameters())
        for epoch in range(5):
            optimizer.zero_grad(); (whole(graph) - wanted).pow(2).sum().backward(); optimizer.step()
    """,
    "from get_batch.., whose tensors have 6 and 4 and 4 rows": """
        rnn, path, times = nn.GRU(8, 8), torch.randn(50, 8), torch.linspace(0, 1, 50)
        optimizer = torch.optim.Adam(rnn.parameters())
        def get_batch():
            begin = torch.randperm(40)[:6]
            return path[begin], times[:4], torch.stack([path[begin + later] for later in range(4)])
        for step in range(9):
            first, when, wanted = get_batch()
            found, _ = rnn(first.expand(len(when), -1, -1))
            optimizer.zero_grad(); F.mse_loss(found, wanted).backward(); optimizer.step()
    """,
    "its weights are float64": """
        net.double()
        optimizer = torch.optim.Adam(net.parameters())
        for x, y in train_loader:
            F.cross_entropy(net(x.double()), y).backward(); optimizer.step()
    """,
    "changes the gradient itself": """
        optimizer = torch.optim.Adam(net.parameters())
        for x, y in train_loader:
            optimizer.zero_grad(); F.cross_entropy(net(x), y).backward()
            for p in net.parameters(): p.grad.mul_(0.5)
            optimizer.step()
    """,
    "changes the weights itself": """
        optimizer = torch.optim.Adam(net.parameters())
        for x, y in train_loader:
            optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
            for p in net.parameters(): p.data.clamp_(-0.1, 0.1)
    """,
    "a bound by hand, weights that are averaged": """
        optimizer = torch.optim.Adam(net.parameters())
        slow = [p.detach().clone() for p in net.parameters()]
        for x, y in train_loader:
            optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
            with torch.no_grad():
                for a, p in zip(slow, net.parameters()): p.copy_(a.lerp_(p, 0.5))
    """,
    "weights that are averaged or copied": f"""{SIAMESE}
        for x, y in train_loader:
            optimizer.zero_grad(); model(x).backward(); optimizer.step()
            model.move()
    """,
    "it sets Tempered.tau from one step to the next": """
        class Tempered(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.tau, self.calls = net, 1.0, 0
            def forward(self, x):
                self.calls += 1
                return self.net(x) / self.tau
        model = Tempered()
        optimizer = torch.optim.Adam(model.parameters())
        for number, (x, y) in enumerate(train_loader):
            model.number = number  # which nothing reads
            optimizer.zero_grad(); F.cross_entropy(model(x), y).backward(); optimizer.step()
            model.tau = max(0.3, model.tau * 0.97)
    """,
    "its loss reads step, which is another": """
        optimizer = torch.optim.Adam(net.parameters())
        for step, (x, y) in enumerate(train_loader, start=1):
            loss = F.cross_entropy(net(x), y)
            if step % 16 == 0:
                loss = loss + sum(p.square().sum() for p in net.parameters())
            optimizer.zero_grad(); loss.backward(); optimizer.step()
    """,
    "clips another norm": """
        optimizer = torch.optim.Adam(net.parameters())
        for x, y in train_loader:
            optimizer.zero_grad(); F.cross_entropy(net(x), y).backward()
            nn.utils.clip_grad_norm_(net[0].parameters(), 0.1)
            optimizer.step()
    """,
    r"clips the norm at 1 while its GradScaler has the gradient multiplied by 65,536, so .* at most 1.5e-05; call scaler.unscale_": """
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        optimizer = torch.optim.Adam(net.parameters())
        for x, y in train_loader:
            optimizer.zero_grad(); scaler.scale(F.cross_entropy(net(x), y)).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer); scaler.update()
    """,
    "that of head, a part of the model that is another in each round of a loop.* add the losses of all up": """
        class Several(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 3) for _ in range(3)])
            def forward(self, x, head): return head(torch.tanh(self.body(x)))
        model = Several()
        optimizer = torch.optim.Adam(model.parameters())
        for x, y in train_loader:
            optimizer.zero_grad()
            for head in model.heads: F.cross_entropy(model(x, head), y).backward()
            optimizer.step()
    """,
    "the following arguments are required: --lr": """
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", required=True)
        parser.parse_args()
    """,
}


LENGTHS = {
    "for epoch in range(5):\n    for x, y in train_loader:\n        STEP": 300,
    "for epoch in range(5):\n    for x, y in train_loader:\n        STEP\n    bad += 1\n    if bad >= 3: break\n    bad = 0": 300,
    "epoch = 0\nwhile epoch < 5:\n    for x, y in train_loader:\n        STEP\n    epoch += 1": 300,
    "for epoch in range(5):\n    for i, (x, y) in enumerate(train_loader):\n        STEP\n        if i >= 4: break": 150,
    "for epoch in range(5):\n    for i, (x, y) in enumerate(train_loader):\n        if i >= 4: break\n        STEP": 120,
    "for epoch in range(5):\n    for i, (x, y) in enumerate(train_loader):\n        if i > 4: break\n        STEP": 150,
    "for epoch in range(5):\n    for i, (x, y) in enumerate(train_loader):\n        STEP\n        if i + 1 == 4: break": 120,
    "for epoch in range(5):\n    for i, (x, y) in enumerate(train_loader, 1):\n        STEP\n        if i == 4: break": 120,
    "for epoch in range(5):\n    for i, (x, y) in enumerate(train_loader):\n        STEP\n        if i >= 40: break": 300,
    "for epoch in range(1, 9):\n    for x, y in train_loader:\n        STEP\n    if epoch >= 5: break": 300,
    "best = 0\nfor epoch in range(5):\n    for x, y in train_loader:\n        STEP\n    if epoch - best > 2: break": 300,
    "import itertools\nfor x, y in itertools.islice(itertools.cycle(train_loader), 70):\n    STEP": 420,
    "step = 0\nwhile True:\n    for x, y in train_loader:\n        STEP\n        step += 1\n        if step >= 25: break\n    if step >= 25: break": 150,
    "import time\nfor epoch in range(5):\n    for x, y in train_loader:\n        STEP\n        if time.time() - 5 > 1e12: break": 300,
    "debug = False\nfor epoch in range(5):\n    for i, (x, y) in enumerate(train_loader):\n        STEP\n        if debug and i >= 4: break": 300,
    "debug = False\nfor epoch in range(5):\n    for i, (x, y) in enumerate(train_loader):\n        STEP\n        if debug:\n            if i >= 4: break": 300,
    "debug = True\nfor epoch in range(5):\n    for i, (x, y) in enumerate(train_loader):\n        STEP\n        if debug:\n            if i >= 4: break": 150,
    "for epoch in range(5):\n    for x, y in train_loader:\n        STEP\n    if epoch >= 2 and bad >= 3: break": 300,
    "best = 0\nfor epoch in range(5):\n    for x, y in train_loader:\n        STEP\n    if epoch > best + 2: break\n    best = epoch": 300,
    "def run(epoch):\n    for i, (x, y) in enumerate(train_loader):\n        STEP\n        if epoch == 0 and i >= 3: break\nfor n in range(5): run(n)": 300,
    "class At:\n    best = 2\n    def note(self, epoch): self.best = epoch + 9\nself = At()\nfor epoch in range(5):\n    for x, y in train_loader:\n        STEP\n    self.note(epoch)\n    if epoch >= self.best: break": 300,
    "step, most = 0, 25\nfor epoch in range(5):\n    for x, y in train_loader:\n        STEP\n        step += 1\n        if most > 0 and step >= most: break\n    if most > 0 and step >= most: break": 150,
    "step = 0\nfor epoch in range(5):\n    for x, y in train_loader:\n        STEP\n        if x is not None:\n            step += 1\n            if step >= 25: break\n    if step >= 25: break": 150,
    "seen = 0\nwhile True:\n    for x, y in train_loader:\n        STEP\n        seen += 6\n        if seen >= 150: break\n    if seen >= 150: break": 150,
    "seen = 0\nwhile seen < 120:\n    for x, y in train_loader:\n        STEP\n        seen += len(x)": None,
    "for epoch in range(5):\n    for n, (x, y) in zip(range(1000), train_loader):\n        STEP": 300,
    "import itertools\nfor epoch in range(5):\n    for x, y in itertools.islice(train_loader, 1000):\n        STEP": 300,
}


SEVERAL_RUNS = """
def train(net, optimizer):
    for epoch in range(5):
        for x, y in train_loader:
            optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
        for group in optimizer.param_groups: group["lr"] *= 0.5
{loop}:
    {model}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train(net, optimizer)
"""


@pytest.mark.parametrize(
    ("loop", "rounds"),
    [("for seed in range(3)", "3"), ("for train, test in iter([(train, 0), (train, 1)])", "several"), ("for once in range(1)", None)],
)  # fmt: skip
def test_a_loop_that_makes_the_model_anew_is_one_over_runs(folder: Path, loop: str, rounds: str | None) -> None:
    """Over seeds, or folds of the data."""
    text = SEVERAL_RUNS.format(loop=loop, model="net = nn.Linear(8, 3)")
    said = settings_of(seen := watched(folder, text), None)
    assert said.run_samples == 300
    assert [f"anew in each of {rounds} rounds of a loop" in one for one in said.told] == [True] * (rounds is not None)
    assert follows(seen, text.replace(loop, "for train in [train]"))


def test_a_loop_that_makes_the_optimizer_alone_anew_is_one_of_the_run(folder: Path) -> None:
    text = SEVERAL_RUNS.format(loop="for stage in range(3)", model="pass")
    said = settings_of(watched(folder, text), None)
    assert said.run_samples == 900
    assert not any("anew" in one for one in said.told)


@pytest.mark.parametrize(
    ("loop", "is_told"),
    [
        ("for x, y in train_loader:\n    for _ in range(4):\n        STEP", True),
        ("x, y = next(iter(train_loader))\nfor step in range(50):\n    STEP", True),
        ("for x, y in train_loader:\n    shift = head(torch.ones(1, 3))\n    STEP", False),
    ],
)
def test_that_a_batch_is_taken_several_times_is_told(folder: Path, loop: str, is_told: bool) -> None:
    step = "optimizer.zero_grad(); F.cross_entropy(net(x) + shift, y).backward(); optimizer.step()"
    made = "shift, head = 0.0, nn.Linear(3, 3)\noptimizer = torch.optim.Adam([*net.parameters(), *head.parameters()])"
    text = f"{made if 'head' in loop else made.replace(', *head.parameters()', '')}\n{loop.replace('STEP', step)}\n"
    said = settings_of(watched(folder, text), None).told
    assert any("takes the batch of the first once more" in one for one in said) is is_told


def test_that_the_length_of_a_run_was_not_found_is_told(folder: Path) -> None:
    text = """
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self): return iter(zip(X, Y))
        stream = DataLoader(Stream(), batch_size=6)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for epoch in range(5):
            for x, y in stream:
                optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
    """
    said = settings_of(watched(folder, text), None)
    assert said.run_samples is None
    assert any("how long its run is was not found" in one for one in said.told)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LENGTHS)
def test_the_length_of_a_run_is_that_of_its_loops(folder: Path, loop: str) -> None:
    step = "optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()"
    text = f"optimizer, bad = torch.optim.Adam(net.parameters()), 0\n{loop.replace('STEP', step)}\n"
    assert keys_of(watched(folder, text))["run_samples"] == LENGTHS[loop]


@pytest.mark.parametrize(
    ("loop", "in_steps"),
    [
        ("for epoch in range(4):\n    for x, y in train_loader:\n        STEP", False),
        ("epoch = 0\nwhile epoch < 4:\n    for x, y in train_loader:\n        STEP\n    epoch += 1", False),
        ("for epoch in range(4):\n    batches = iter(train_loader)\n    for n in range(len(train_loader)):\n        x, y = next(batches)\n        STEP", False),
        ("batches = endless(train_loader)\nfor step in range(40):\n    x, y = next(batches)\n    STEP", True),
        ("for epoch in range(8):\n    for i, (x, y) in enumerate(train_loader):\n        STEP\n        if i >= 4: break", True),
    ],
)  # fmt: skip
def test_a_run_counts_steps_or_passes_over_the_data(folder: Path, loop: str, in_steps: bool) -> None:
    step = "optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()"
    head = "def endless(loader):\n    while True:\n        yield from loader\noptimizer = torch.optim.Adam(net.parameters())"
    said = settings_of(watched(folder, f"{head}\n{loop.replace('STEP', step)}\n"), None)
    assert (said.run_samples, said.in_steps) == (240, in_steps)


ROWS = {
    "a slice": "for i in range(0, len(X), 6):\n    x, y = X[i:i+6], Y[i:i+6]\n    STEP",
    "within the call": "for i in range(0, X.shape[0], 6):\n    optimizer.zero_grad(); F.cross_entropy(net(X[i:i+6]), Y[i:i+6]).backward(); optimizer.step()",
    "by number": "for b in range(len(X) // 6):\n    x, y = X[b * 6:(b + 1) * 6], Y[b * 6:(b + 1) * 6]\n    STEP",
    "shuffled": "order = torch.randperm(len(X))\nfor i in range(0, len(X), 6):\n    rows = order[i:i+6]\n    x, y = X[rows], Y[rows]\n    STEP",
    "shuffled within": "order = torch.randperm(len(X))\nfor i in range(0, len(X), 6):\n    x, y = X[order[i:i+6]], Y[order[i:i+6]]\n    STEP",
    "split": "for rows in torch.randperm(len(X)).split(6):\n    x, y = X[rows], Y[rows]\n    STEP",
    "arrays": "for i in range(0, len(X), 6):\n    x, y = torch.from_numpy(A[i:i+6]), torch.tensor(B[i:i+6])\n    STEP",
    "in place": "for i in range(0, len(X), 6):\n    x, y = torch.from_numpy(A[i:i+6].copy()), Y[i:i+6]\n    x -= 0.5\n    x.div_(2.0).sub_(1.0)\n    STEP",
    "lists": "for i in range(0, len(L), 6):\n    x, y = torch.stack([torch.tensor(one) for one in L[i:i+6]]), torch.tensor(M[i:i+6])\n    STEP",
    "drawn": "for number in range(10):\n    rows = torch.randint(0, len(X), (6,))\n    x, y = X[rows], Y[rows]\n    STEP",
    "columns": "for i in range(0, len(W), 6):\n    x, y = W[i:i+6, :8], W[i:i+6, 8].long()\n    STEP",
}


@pytest.mark.slow
@pytest.mark.parametrize("form", ROWS)
def test_rows_that_a_script_takes_itself_are_the_samples(folder: Path, form: str) -> None:
    step = "optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()"
    tables = "A, B, W = X.numpy(), Y.numpy(), torch.cat([X, Y[:, None]], 1)\nL, M = X.tolist(), Y.tolist()\n"
    body = textwrap.indent(ROWS[form].replace("STEP", step), "    ")
    loop = watched(folder, f"{tables}optimizer = torch.optim.Adam(net.parameters())\nfor epoch in range(5):\n{body}\n")
    keys = keys_of(loop)
    assert (keys["optimizer"]["reference_batch_size"], keys["run_samples"]) == (6, 300)
    assert "order" not in loop.batches.source.names, "which says only where the samples are"
    train, val = sets_of(loop)
    assert (len(train.dataset), len(val.dataset)) == (54, 6)
    model = model_of(loop)
    model(next(iter(train))).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_rows_that_are_taken_in_one_number_alone_leave_the_loss_to_be_written(folder: Path) -> None:
    """They are others in each step, so that there is a batch to choose, once the loss takes one of another size."""
    step = "optimizer.zero_grad(); F.cross_entropy(net(x.view(6, 8)), y).backward(); optimizer.step()"
    body = textwrap.indent(ROWS["a slice"].replace("STEP", step), "    ")
    with pytest.raises(ValueError, match="batches of one size alone"):
        watched(folder, f"optimizer = torch.optim.Adam(net.parameters())\nfor epoch in range(5):\n{body}\n")


@pytest.mark.parametrize(
    "loop",
    [
        "order = torch.randperm(len(X)); chosen = order[:40]",
        "chosen = torch.arange(40)",
    ],
)
def test_rows_that_the_script_never_takes_are_no_samples(folder: Path, loop: str) -> None:
    text = f"""
        {loop}
        optimizer = torch.optim.Adam(net.parameters())
        for epoch in range(5):
            mixed = chosen[torch.randperm(len(chosen))]
            for i in range(0, 40, 8):
                rows = mixed[i:i+8]
                optimizer.zero_grad(); F.cross_entropy(net(X[rows]), Y[rows]).backward(); optimizer.step()
    """
    loop_ = watched(folder, text)
    train, val = sets_of(loop_)
    taken = sorted(int(one) for one in loop_.place.get("chosen"))
    found = torch.stack([sample[0] for part in (train, val) for sample in part.dataset])
    assert torch.equal(found.sort(0).values, loop_.place.get("X")[taken].sort(0).values)


def test_of_a_slice_the_rows_end_where_its_loop_ends(folder: Path) -> None:
    text = """
        optimizer = torch.optim.Adam(net.parameters())
        for i in range(0, 40, 8):
            optimizer.zero_grad(); F.cross_entropy(net(X[i:i+8]), Y[i:i+8]).backward(); optimizer.step()
    """
    train, val = sets_of(watched(folder, text))
    assert (len(train.dataset), len(val.dataset)) == (36, 4)


@pytest.mark.parametrize(
    "body",
    [
        "T = X + 0.1 * torch.randn_like(X)\n    rows = torch.randperm(60)[:6]\n    x, y = T[rows], Y[rows]",
        "rows = torch.multinomial(torch.ones(60), 6)\n    x, y = X[rows], Y[rows]",
        "X.mul_(0.9)\n    rows = torch.randperm(60)[:6]\n    x, y = X[rows], Y[rows]",
        "picked = [3 * step, 3 * step + 1, 3 * step + 2]\n    x, y = stacked(picked), Y[picked]",
    ],
)
def test_rows_that_are_drawn_by_weights_or_of_a_table_that_changes_are_refused(folder: Path, body: str) -> None:
    step = "optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()"
    head = "def stacked(rows): return torch.stack([X[i] for i in rows])\noptimizer = torch.optim.Adam(net.parameters())"
    with pytest.raises(ValueError, match="could not be had from its loop"):
        watched(folder, f"{head}\nfor step in range(10):\n    {body}\n    {step}\n")


@pytest.mark.parametrize(
    "names",
    [
        "X_train, y_train, X_val, y_val, X_test, y_test", "X_tr, y_tr, X_va, y_va, X_te, y_te",
        "imgs, labels, val_imgs, val_labels, test_imgs, test_labels", "Xtrain, ytrain, Xval, yval, Xtest, ytest",
    ],
)  # fmt: skip
def test_rows_of_validation_data_are_those_of_tables_that_are_called_alike(folder: Path, names: str) -> None:
    x, y = names.split(", ")[:2]
    text = f"""
        {names} = X[:40], Y[:40], X[40:55], Y[40:55], X[55:], Y[55:]
        optimizer = torch.optim.Adam(net.parameters())
        for i in range(0, 40, 8):
            optimizer.zero_grad(); F.cross_entropy(net({x}[i:i+8]), {y}[i:i+8]).backward(); optimizer.step()
    """
    train, val = sets_of(watched(folder, text))
    assert (len(train.dataset), len(val.dataset)) == (40, 15)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("X_train, y_train, X_val, y_val", "batches(X_val, y_val)"), ("X_tr, y_tr, X_va, y_va", "batches(X_va, y_va)"),
        ("X_train, y_train, X_val, other", ""),
    ],
)  # fmt: skip
def test_a_call_for_validation_data_has_all_tables_of_these(folder: Path, names: str, found: str) -> None:
    text = f"""
        {names} = X[:40], Y[:40], X[40:], Y[40:]
        def batches(a, b):
            for i in range(0, len(a), 8): yield a[i:i+8], b[i:i+8]
        optimizer = torch.optim.Adam(net.parameters())
        for x, y in batches({", ".join(names.split(", ")[:2])}):
            optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
    """
    assert watched(folder, text).batches.source.validation_text == found


def test_of_a_stream_without_validation_every_tenth_sample_is_held_out(folder: Path) -> None:
    stream = """
class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from ((torch.full((8,), float(n)), torch.tensor(n % 3)) for n in range(60))
optimizer = torch.optim.Adam(net.parameters())
for x, y in DataLoader(Numbers(), batch_size=6):
    optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
"""
    loop = watched(folder, stream, head=HEAD.replace("val_loader =", "other ="))
    loop.seen.loaders.clear()
    train, val = (list(one.dataset) for one in sets_of(loop))
    assert [int(x[0]) for x, _ in val] == [9, 19, 29, 39, 49, 59]
    assert len(train) == 54


@pytest.mark.parametrize(
    "name",
    [
        "vali_loader",
        "evaluation_loader",
        "heldout",
        "val_loader",
        "valloader",
        "validdataloader",
        "devset",
        "vl",
        "va_dl",
    ],
)
def test_validation_data_come_before_those_of_a_test(folder: Path, name: str) -> None:
    head = HEAD.replace("val_loader =", f"{name} =")
    loop = watched(folder, "test_loader = DataLoader(TensorDataset(X[20:], Y[20:]), batch_size=10)" + PLAIN, head=head)
    assert len(sets_of(loop)[1].dataset) == 20
    assert not any("chooses by" in one for one in settings_of(loop, None).told)


@pytest.mark.parametrize("name", ["test_loader", "testloader", "te_loader"])
def test_a_choice_that_is_made_by_a_tests_data_says_so(folder: Path, name: str) -> None:
    loop = watched(folder, PLAIN, head=HEAD.replace("val_loader =", f"{name} ="))
    assert len(sets_of(loop)[1].dataset) == 20
    assert any(f"the study chooses by {name}" in one for one in settings_of(loop, None).told)


@pytest.mark.parametrize("name", ["others", "trainloader2", "invalid_loader"])
def test_a_loader_that_is_not_known_to_be_of_validation_data_is_named(folder: Path, name: str) -> None:
    loop = watched(folder, PLAIN, head=HEAD.replace("val_loader =", f"{name} ="))
    assert len(sets_of(loop)[1].dataset) == 6
    assert any(f"no other loader of the script ({name}) has a name of" in one for one in settings_of(loop, None).told)


@pytest.mark.parametrize("word", ["val", "test"])
@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            """
            X_train, y_train, X_val, y_val = X[:40], Y[:40], X[40:], Y[40:]
            optimizer = torch.optim.Adam(net.parameters())
            for i in range(0, 40, 8):
                optimizer.zero_grad(); F.cross_entropy(net(X_train[i:i+8]), y_train[i:i+8]).backward(); optimizer.step()
            """,
            "X_test and y_test",
        ),
        (GET_BATCH, "get_batch('test')"),
    ],
    ids=["rows", "a call"],
)
def test_a_choice_by_rows_or_a_call_of_a_tests_data_says_so_too(folder: Path, text: str, name: str, word: str) -> None:
    loop = watched(folder, re.sub('(?<=[_"])val\\b', word, text))
    told = [one for one in settings_of(loop, None).told if "the study chooses by" in one]
    assert [name in one for one in told] == ([True] if word == "test" else [])


@pytest.mark.parametrize(
    "how",
    [
        "sampler=torch.utils.data.WeightedRandomSampler(torch.ones(60), 60), batch_size=6",
        "batch_sampler=[list(range(6)), list(range(6, 20))]",
    ],
)
@pytest.mark.parametrize("val_loader", ["val_loader", "others"])
def test_a_loader_that_a_study_cannot_batch_is_called_as_the_script_does(
    folder: Path, how: str, val_loader: str
) -> None:
    head = HEAD.replace("val_loader", val_loader)
    watched(folder, PLAIN, head=re.sub("batch_size=6, shuffle=True", how, head))
    with pytest.raises(ValueError, match=r"^train_loader (makes its batches|chooses its samples) by a"):
        read(Source("script", "train.py", {"args": []}))


def test_two_parts_of_one_set_stay_apart(folder: Path) -> None:
    parts = """
from torch.utils.data import SubsetRandomSampler
whole = TensorDataset(X, Y)
first = DataLoader(whole, batch_size=6, sampler=SubsetRandomSampler(range(0, 50)))
held = DataLoader(whole, batch_size=6, sampler=SubsetRandomSampler(range(50, 60)))
loaders = {"train": first, "valid": held}
optimizer = torch.optim.Adam(net.parameters())
for x, y in loaders["train"]:
    optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
"""
    loop = watched(folder, parts, head=HEAD.replace("val_loader", "other").replace("train_loader", "another"))
    loop.seen.loaders[:] = [one for one in loop.seen.loaders if one.dataset is loop.batches.source.loader.dataset]
    train, val = sets_of(loop)
    assert (len(train.dataset), len(val.dataset)) == (50, 10)
    assert not {tuple(x.tolist()) for x, _ in train.dataset} & {tuple(x.tolist()) for x, _ in val.dataset}


def test_a_sum_that_sgd_takes_as_it_is_has_no_rate_for_another_batch(folder: Path) -> None:
    loop = watched(folder, PLAIN)
    with pytest.raises(ValueError, match="its loss is a sum over the batch, and SGD does not divide"):
        settings_of(dataclasses.replace(loop, sums=True), None)


def test_a_script_that_swallows_everything_ends_all_the_same(folder: Path) -> None:
    swallowed = PLAIN.replace(
        "        optimizer.step()", "        try: optimizer.step()\n        except: pass\n        done.append(1)"
    )
    loop = watched(folder, "done = []" + swallowed)
    assert len(loop.loss.place.global_["done"]) <= 2, "every step after the second ends it again"


def test_a_part_that_is_frozen_in_evaluation_mode_stays_so(folder: Path) -> None:
    loop = watched(folder, PLAIN.replace("for epoch", "net[2].eval()\nfor epoch", 1))
    model = model_of(loop).train()
    assert [part.training for part in model.inner] == [True, True, False, True]


CHECKPOINTS_ITSELF = """
from transformers import GPT2Config, GPT2LMHeadModel
rows = torch.randint(40, (24, 8))
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=8))
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters())
for (ids,) in DataLoader(TensorDataset(rows), batch_size=4):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the library's two names for it
@pytest.mark.parametrize("is_on", [True, False])
def test_a_model_that_checkpoints_itself_does_not_in_a_study_and_that_is_told(folder: Path, *, is_on: bool) -> None:
    pytest.importorskip("transformers")
    loop = watched(folder, CHECKPOINTS_ITSELF if is_on else CHECKPOINTS_ITSELF.replace("_enable", "_disable"))
    assert [one.is_gradient_checkpointing for one in loop.seen.pristine.values()] == [is_on]
    assert not model_of(loop).inner.is_gradient_checkpointing
    assert ("gradient_checkpointing is the study's to decide" in settings_of(loop, None).told) == is_on


def test_a_copy_of_a_run_computes_with_weights_of_its_own(folder: Path) -> None:
    model = model_of(watched(folder, PLAIN)).eval()
    batch = next(iter(sets_of(script.made(script="train.py"))[0]))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert other(batch).item() == pytest.approx(math.log(3))
    assert model(batch).item() != pytest.approx(math.log(3), rel=1e-4)


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_study_is_refused_with_its_reason(folder: Path, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        watched(folder, REFUSED[reason])


def test_an_average_within_the_model_that_the_loss_does_not_read_is_no_change_by_hand(folder: Path) -> None:
    text = f"""{SIAMESE}
        for x, y in train_loader:
            optimizer.zero_grad(); model(x, y).backward(); optimizer.step()
            model.move()
    """
    assert keys_of(watched(folder, text))["run_samples"] == 60


def test_a_part_that_a_forward_moves_itself_is_no_change_by_hand(folder: Path) -> None:
    text = """
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.mean = net, nn.Parameter(torch.zeros(8), requires_grad=False)
            def forward(self, x):
                if self.training: self.mean.data.lerp_(x.mean(0), 1e-4)
                return self.net(x - self.mean)
        model = Scaled()
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
        for x, y in train_loader:
            optimizer.zero_grad(); F.cross_entropy(model(x), y).backward(); optimizer.step()
    """
    assert keys_of(watched(folder, text))["run_samples"] == 60


HIDDEN = """
    rnn, head = nn.GRU(8, 4), nn.Linear(4, 3)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = rnn, head
        def forward(self, x, hidden):
            out, hidden = self.rnn(x, hidden)
            return self.head(out), hidden
        def first(self): return torch.zeros(1, 4)
    net = Net()
    optimizer, hidden = torch.optim.Adam(net.parameters()), net.first()
    for x, y in train_loader:
        out, hidden = net(x, hidden.detach())
        F.cross_entropy(out, y).backward()
        optimizer.step()
"""


def test_where_the_loss_alone_is_not_had_all_else_is(folder: Path) -> None:
    with pytest.raises(LossNotSeen, match="reads hidden, which the step before has left"):
        watched(folder, HIDDEN)
    loop = script.made(script="train.py", own_loss=True)
    keys = keys_of(loop)
    assert keys["optimizer"]["reference_batch_size"] == 6
    model = model_of(loop)
    x, y = next(iter(sets_of(loop)[0]))
    logits, _ = model(x, model.first())  # as the script calls its own module, and its methods
    nn.functional.cross_entropy(logits, y, reduction="sum").backward()
    grouped = [p for group in param_groups(model) for p in group["params"]]
    assert len(grouped) == len(list(model.parameters()))
    assert all(p.grad is not None for p in grouped)


def test_a_script_in_another_folder_finds_what_is_beside_it_later_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend("nowhere")  # and takes back what is added to the path
    (folder / "scripts").mkdir()
    (folder / "scripts" / "beside_it.py").write_text("factor = 2.0\n")
    lazy = "F.cross_entropy(net(x), y) * __import__('beside_it').factor"
    (folder / "scripts" / "run.py").write_text(HEAD + PLAIN.replace("F.cross_entropy(net(x), y)", f"({lazy})"))
    script.watched.cache_clear()
    loop = script.made(script="scripts/run.py")
    sys.modules.pop("beside_it")
    assert model_of(loop)(next(iter(sets_of(loop)[0]))).item() > 0


def test_the_process_is_as_it_was_afterwards(folder: Path) -> None:
    before = (torch.nn.Module.__call__, torch.Tensor.backward, torch.compile, list(sys.argv), sys.modules["__main__"])
    watched(folder, PLAIN)
    assert (
        torch.nn.Module.__call__,
        torch.Tensor.backward,
        torch.compile,
        list(sys.argv),
        sys.modules["__main__"],
    ) == before


TRAINER = """
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
rows = Dataset.from_dict({"input_ids": torch.randint(40, (24, 8)).tolist()})
rows = rows.map(lambda row: {"labels": row["input_ids"]})
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=8))
arguments = TrainingArguments("out", per_device_train_batch_size=4, learning_rate=3e-4, num_train_epochs=5, use_cpu=True, report_to="none")
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
trainer.train()
trainer.save_model("out")
"""
LIGHTNING = """
import lightning
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = lightning.Trainer(max_epochs=5, accelerator="cpu", enable_progress_bar=False, logger=False, enable_checkpointing=False)
trainer.fit(Net(), {loaders})
trainer.save_checkpoint("out.ckpt")
"""


ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
eval_loader = val_loader
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
net, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(net, optimizer, train_loader, eval_loader, schedule)
for epoch in range(4):
    for step, batch in enumerate(train_loader):
        with accelerator.accumulate(net):
            loss = F.cross_entropy(net(batch[0]), batch[1])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step(); schedule.step(); optimizer.zero_grad()
"""


def test_a_loop_of_accelerate_is_taken_with_what_it_prepares(folder: Path) -> None:
    pytest.importorskip("accelerate")
    loop = watched(folder, ACCELERATE)
    keys = keys_of(loop)
    recipe = {"lr": 0.01, "reference_batch_size": 12, "max_gradient_norm": 1.0}
    assert recipe.items() <= keys["optimizer"].items()
    assert (keys["schedule"]["type"], keys["run_samples"]) == ("table", 240)
    model, batch = model_of(loop).eval(), next(iter(sets_of(loop)[0]))
    wanted = nn.functional.cross_entropy(model.inner(batch[0]), batch[1])
    assert model(batch).item() == pytest.approx(wanted.item()), "not divided by its accumulation"
    assert len(sets_of(loop)[1].dataset) == 20


def test_a_trainer_of_transformers_is_taken_where_it_would_begin_to_train(folder: Path) -> None:
    pytest.importorskip("transformers")
    trainer = watched(folder, TRAINER)
    said = settings_of(trainer, None)
    assert (said.keys["optimizer"]["lr"], said.run_samples) == (3e-4, 120)
    again = script.made(script="train.py", args=())
    assert again.model is not trainer.model, "each run has weights of its own"
    assert not (folder / "out").exists()


TWO_RATES = """optimizer = torch.optim.AdamW([
    {"params": list(model.parameters())[:3], "lr": 1e-4}, {"params": list(model.parameters())[3:]}
], lr=1e-3)
trainer = Trainer(model, arguments, optimizers=(optimizer, None),"""


def test_a_trainer_that_was_given_its_optimizer_trains_the_weights_of_each_run_in_its_groups(folder: Path) -> None:
    pytest.importorskip("transformers")
    model = model_of(watched(folder, TRAINER.replace("trainer = Trainer(model, arguments,", TWO_RATES)))
    first, last = param_groups(model)
    assert [id(p) for p in (*first["params"], *last["params"])] == [id(p) for p in model.parameters()]
    assert (len(first["params"]), first["lr"], last["lr"]) == (3, 1e-4, 1e-3)


ON_A_GPU = """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    on_a_gpu = torch.empty(2, device="cuda")
"""


@pytest.mark.parametrize(
    ("library", "text"),
    [
        (
            "transformers",
            TRAINER.replace("trainer.train()", "model.register_buffer('there', on_a_gpu)\ntrainer.train()"),
        ),
        (
            "lightning",
            LIGHTNING.format(loaders="train_loader").replace("= net", "= net; self.register_buffer('there', on_a_gpu)"),
        ),
    ],
    ids=["transformers", "lightning"],
)
def test_a_model_that_is_trained_elsewhere_takes_no_memory_of_the_device_beside_its_copies(
    folder: Path, library: str, text: str
) -> None:
    """A Trainer moves its model to the GPU when it is made; each run moves its own copy there."""
    pytest.importorskip(library)
    (folder / "train.py").write_text(HEAD + ON_A_GPU + text)
    script.watched.cache_clear()
    found = script.watched("train.py", ()).found
    module = found.model if library == "transformers" else found[0]
    assert module.there.device.type == "cpu"


@pytest.mark.parametrize(
    ("library", "text"),
    [
        ("transformers", TRAINER.replace("trainer.train()", "trainer.train(resume_from_checkpoint=True)")),
        ("lightning", LIGHTNING.format(loaders="train_loader, val_loader, ckpt_path='last.ckpt'")),
        ("lightning", LIGHTNING.format(loaders="train_loader, val_loader, ckpt_path=None")),
    ],
    ids=["transformers", "lightning", "without one"],
)
def test_that_a_trainer_would_go_on_from_a_checkpoint_is_told(folder: Path, library: str, text: str) -> None:
    pytest.importorskip(library)
    found = watched(folder, text)
    told = settings_of(found, None if library == "transformers" else sets_of(found)[0]).told
    assert any("goes on from a checkpoint" in one for one in told) == ("ckpt_path=None" not in text)


@pytest.mark.parametrize(
    "loaders",
    [
        "train_loader, val_loader",
        "datamodule=lightning.LightningDataModule.from_datasets(train_loader.dataset, val_loader.dataset, batch_size=6)",
    ],
)
def test_what_lightnings_fit_is_called_with_is_taken(folder: Path, loaders: str) -> None:
    pytest.importorskip("lightning")
    found = watched(folder, LIGHTNING.format(loaders=loaders))
    train, val = sets_of(found)
    said = settings_of(found, train)
    assert (said.keys["optimizer"]["lr"], said.keys["optimizer"]["reference_batch_size"]) == (0.1, 6)
    assert (len(train.dataset), len(val.dataset), said.run_samples) == (60, 20, 300)
    assert isinstance(model_of(found).inner.net, nn.Module)
