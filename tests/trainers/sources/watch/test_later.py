"""What two steps of a script do not show: what its functions are handed later, what its loops change later, a second training, an early end."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from batchscout.trainers.before.read_source import read
from batchscout.trainers.before.source import Source
from batchscout.trainers.errors import LossNotSeen
from batchscout.trainers.sources.adapted import settings_of
from batchscout.trainers.sources.watch import script
from tests.support.scripts import PLAIN, keys_of, model_of, sets_of, watched

STEP = "optimizer.zero_grad(); loss.backward(); optimizer.step()"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def filled(text: str) -> str:
    return textwrap.dedent(text).replace("STEP", STEP)


def told(loop: Any, words: str) -> list[str]:
    return [one for one in settings_of(loop, None).told if words in one]


WEIGHTED_LATER = {
    "made of an argument": """
        def train(net, epoch):
            beta = min(1.0, epoch / 10)
            for x, y in train_loader:
                loss = F.cross_entropy(net(x), y) + beta * net(x).pow(2).mean()
                STEP
        for epoch in range(50): train(net, epoch)
    """,
    "called otherwise": """
        def train(net, number):
            for x, y in train_loader:
                loss = F.cross_entropy(net(x), y) + min(1.0, number / 10) * net(x).pow(2).mean()
                STEP
        for epoch in range(50): train(net, epoch)
    """,
    "made in the call": """
        def train(net, beta):
            for x, y in train_loader:
                loss = F.cross_entropy(net(x), y) + beta * net(x).pow(2).mean()
                STEP
        for epoch in range(50):
            train(net, beta=min(1.0, epoch / 10))
    """,
    "chosen by an if": """
        def train(net, factor):
            for x, y in train_loader:
                loss = F.cross_entropy(net(x), y) + factor * net(x).pow(2).mean()
                STEP
        beta = 0.0
        for epoch in range(50):
            if epoch > 9: beta = 1.0
            train(net, beta)
    """,
    "handed on twice": """
        def step(x, y, weight):
            loss = F.cross_entropy(net(x), y) + weight * net(x).pow(2).mean()
            STEP
        def train(epoch):
            for x, y in train_loader: step(x, y, epoch // 5)
        for number in range(50): train(number)
    """,
    "an attribute": """
        class Trainer:
            def __init__(self): self.passes = 0
            def fit(self):
                for self.epoch in range(50): self.train()
            def train(self):
                self.beta = min(1.0, self.epoch / 10)
                for x, y in train_loader:
                    loss = F.cross_entropy(net(x), y) + self.beta * net(x).pow(2).mean()
                    STEP
        Trainer().fit()
    """,
    "what a dictionary has": """
        weights = {"kind": "ce", "beta": 0.0}
        for epoch in range(50):
            weights["beta"] = min(1.0, epoch / 10)
            for x, y in train_loader:
                loss = F.cross_entropy(net(x), y) + weights["beta"] * net(x).pow(2).mean()
                STEP
    """,
    "what a list has, in a function": """
        betas = [0.0, 1.0]
        def train(epoch):
            betas[0] += 0.1
            for x, y in train_loader:
                loss = betas[1] * F.cross_entropy(net(x), y) + betas[0] * net(x).pow(2).mean()
                STEP
        for epoch in range(50): train(epoch)
    """,
    "an attribute that its function counts": """
        class Trainer:
            def __init__(self): self.passes = 0
            def fit(self):
                for _ in range(50): self.train()
            def train(self):
                for x, y in train_loader:
                    loss = F.cross_entropy(net(x), y) + min(1.0, self.passes / 10) * net(x).pow(2).mean()
                    STEP
                self.passes += 1
        Trainer().fit()
    """,
}


@pytest.mark.parametrize("form", WEIGHTED_LATER)
def test_a_loss_that_reads_what_a_later_pass_changes_is_refused(folder: Path, form: str) -> None:
    text = f"optimizer = torch.optim.Adam(net.parameters())\n{filled(WEIGHTED_LATER[form])}"
    with pytest.raises(ValueError, match="which is another in later batches"):
        watched(folder, text)


HANDED_ON = {
    "numbers that stay, and a word": """
        def train(net, epoch, count, kind, is_first):
            classes = net[3].out_features
            if epoch == 0 and is_first: print("first")
            for x, y in train_loader:
                loss = F.cross_entropy(net(x), y) * (count / 60) * (classes if kind == "train" else 1) * (2 if is_first else 1)
                STEP
        for epoch in range(5):
            size = len(train_loader.dataset)
            for phase in ["train", "val"]:
                if phase == "train": train(net, epoch, size, phase, True)
    """,
    "a branch of the phase": """
        def train(net, epoch):
            for phase in ["train", "val"]:
                for x, y in train_loader:
                    with torch.set_grad_enabled(phase == "train"):
                        if phase == "train" and net[3].out_features == 3:
                            loss = F.cross_entropy(net(x), y)
                        else:
                            loss = F.mse_loss(net(x), F.one_hot(y).float())
                        if phase == "train":
                            STEP
        for epoch in range(5): train(net, epoch)
    """,
    "the epoch is printed": """
        def loss_of(x, y, epoch):
            if epoch == 0: print(x.shape)
            return F.cross_entropy(net(x), y)
        def train(number):
            shown = f"epoch {number}"
            for x, y in train_loader:
                loss = loss_of(x, y, number)
                STEP
                print(shown, loss.item())
        for epoch in range(5): train(epoch)
    """,
    "what a dictionary has, beside what changes": """
        state = {"beta": 0.5, "epoch": 0, "norm": 1.0, "kind": "ce"}
        for epoch in range(5):
            state["epoch"], state["kind"] = epoch, "ce"
            state["beta"] = 0.5
            for x, y in train_loader:
                out = net(x)
                state["norm"] = x.size(1)
                parts = {"n": 0}
                for _ in range(2): parts["n"] += 1
                loss = F.cross_entropy(out, y) / parts["n"] + state["beta"] * out.pow(2).mean() / state["norm"]
                STEP
    """,
    "made of each batch alike": """
        def step(x, y, mask, width):
            loss = F.cross_entropy(net(x) * mask, y) / width
            STEP
        for epoch in range(5):
            for x, y in train_loader:
                keep, size = torch.ones(3), x.size(1)
                step(x, y, keep, size)
    """,
    "a counter of its own is printed": """
        class Trainer:
            def __init__(self): self.steps = 0
            def fit(self):
                for _ in range(5): self.train()
            def loss(self, x, y, step):
                if step % 10 == 0: print(step)
                return F.cross_entropy(net(x), y)
            def train(self):
                for x, y in train_loader:
                    loss = self.loss(x, y, self.steps)
                    STEP
                    self.steps += 1
        Trainer().fit()
    """,
}


@pytest.mark.parametrize("form", HANDED_ON)
def test_what_is_handed_on_and_leaves_the_loss_as_it_is_is_taken(folder: Path, form: str) -> None:
    text = f"optimizer = torch.optim.Adam(net.parameters())\n{filled(HANDED_ON[form])}"
    loop = watched(folder, text)
    assert keys_of(loop)["run_samples"] == 300
    model_of(loop)(next(iter(sets_of(loop)[0]))).backward()


@pytest.mark.parametrize(
    ("loss", "is_divided"),
    [
        ("F.cross_entropy(net(x.clone()), y) / 4", True),
        ("F.cross_entropy(net(batch[0]), batch[1]) / accumulated", True),
        ("F.cross_entropy(net(x.clone()), y) / 4 + net(x).pow(2).mean() / 4", True),
        ("torch.mean(F.cross_entropy(net(x), y, reduction='none') / 4)", True),
        ("F.cross_entropy(net(x.clone()) / 4, y) * 0.25", True),
        ("F.cross_entropy(net(x.clone() / 4), y)", False),
        ("F.cross_entropy(net(x) / accumulated, y)", False),
    ],
)
def test_a_loss_is_divided_by_the_micro_batches_where_it_is_so_many_times_less(
    folder: Path, loss: str, is_divided: bool
) -> None:
    text = f"""
        optimizer, accumulated = torch.optim.SGD(net.parameters(), lr=0.1), 4
        for number, batch in enumerate(train_loader):
            x, y = batch
            loss = {loss}
            loss.backward()
            if (number + 1) % accumulated == 0:
                optimizer.step(); optimizer.zero_grad()
    """
    loop = watched(folder, text)
    assert (loop.is_averaged, loop.times) == (is_divided, 4.0 if is_divided else 1.0)


def test_of_a_mean_with_class_weights_the_loss_alone_is_missing_or_what_it_is_a_mean_over(folder: Path) -> None:
    (folder / "weights_beside.py").write_text(
        "import torch\nweights = torch.tensor([0.2, 1.0, 5.0])\ndef total(batch): return weights[batch[1]].sum()\n"
    )
    weighted = PLAIN.replace("net(x), y)", "net(x), y, weight=weights_beside.weights)")
    watched(folder, f"import weights_beside\n{weighted}")
    with pytest.raises(LossNotSeen, match=r"a mean, and over what is not clear .* num_targets: .* leave out loss"):
        read(Source("script", "train.py", {"args": []}))
    assert read(Source("script", "train.py", {"args": [], "own_loss": True})).run_samples == 300
    found = read(Source("script", "train.py", {"args": []}, "weights_beside:total"))
    assert found.keys["loss"]["over"] == "weights_beside:total"


ANOTHER_OPTIMIZER = {
    "folds that copy": """
        import copy
        for fold in range(3):
            model = copy.deepcopy(net)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for epoch in range(5):
                for x, y in train_loader:
                    loss = F.cross_entropy(model(x), y)
                    STEP
    """,
    "folds that reset": """
        first = {name: value.clone() for name, value in net.state_dict().items()}
        for fold in range(3):
            net.load_state_dict(first)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for epoch in range(5):
                for x, y in train_loader:
                    loss = F.cross_entropy(net(x), y)
                    STEP
    """,
    "another head for each task": """
        for task in range(3):
            net[3] = nn.Linear(16, 3)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for epoch in range(5):
                for x, y in train_loader:
                    loss = F.cross_entropy(net(x), y)
                    STEP
    """,
    "each pass": """
        def train(epoch):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1 / (1 + epoch))
            for x, y in train_loader:
                loss = F.cross_entropy(net(x), y)
                STEP
        for epoch in range(15): train(epoch)
    """,
    "a list of them": """
        head, whole = (torch.optim.SGD(some.parameters(), lr=0.1) for some in (net[3], net))
        for optimizer, passes in [(whole, 5), (head, 5), (whole, 5)]:
            for epoch in range(5):
                for x, y in train_loader:
                    loss = F.cross_entropy(net(x), y)
                    STEP
    """,
}


@pytest.mark.parametrize("form", ANOTHER_OPTIMIZER)
def test_that_rounds_of_a_loop_have_another_optimizer_each_is_told(folder: Path, form: str) -> None:
    """Whether they are runs of their own, only who wrote them knows: they count as one run."""
    loop = watched(folder, filled(ANOTHER_OPTIMIZER[form]))
    assert keys_of(loop)["run_samples"] == 900
    line = 1 + next(
        number for number, one in enumerate(Path("train.py").read_text().splitlines()) if one.startswith("for ")
    )
    assert len(told(loop, f"another optimizer in each round of the loop in line {line} of train.py")) == 1
    assert told(loop, "makes its model") == []


CHANGED_LATER = """
class Loss(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight
    def forward(self, out, y): return self.weight * F.cross_entropy(out, y)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.tau, self.epoch, self.shown = net, 1.0, 0, 0
    def at(self, epoch): self.epoch = epoch
    def forward(self, x): return self.net(x) / (self.tau + self.epoch)
class Drawn(TensorDataset):
    def draw_again(self): pass
    def set_epoch(self, epoch): pass
def release(model, from_it_on):
    for p in model.parameters(): p.requires_grad = True
def released(model, now):
    if now > 3:
        for name, weight in model.named_parameters(): weight.requires_grad_(True)
model, others, accuracy, best, args = Net(), nn.Linear(8, 3), 0.0, 0.0, argparse.Namespace(debug=False)
train_set = Drawn(X, Y)
train_loader = DataLoader(train_set, batch_size=6, shuffle=True)
criterion, weights = Loss(1.0), [1.0, 2.0, 3.0, 4.0, 5.0]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(5):
    {before}
    for number, (x, y) in enumerate(train_loader):
        loss = criterion(model(x), y)
        STEP
        {by_batch}
    {after}
"""
NOT_AT_ALL = {"before": "pass", "by_batch": "pass", "after": "pass"}


@pytest.mark.parametrize(
    "changed",
    [
        {"after": "if epoch == 2:\n        for p in model.parameters(): p.requires_grad = True"},
        {"before": "if epoch == 2: model.net[0].requires_grad_(True)"},
        {"before": "if epoch == 2: release(model, 2)"},
        {"before": "released(model, epoch)"},
        {"after": "if epoch == 2: optimizer.add_param_group({'params': others.parameters()})"},
        {"after": "if epoch == 2: optimizer = torch.optim.SGD(model.parameters(), lr=0.01)"},
        {"before": "if epoch > 0: optimizer = torch.optim.SGD(model.parameters(), lr=0.01)"},
        {"before": "criterion = Loss(weights[epoch])"},
        {"before": "model.tau = 1.0 / (1 + epoch)"},
        {"before": "model.at(epoch)"},
        {"before": "if epoch == 3: model.tau = 0.5"},
        {"after": "criterion.weight = criterion.weight * 0.9"},
        {"after": "train_set.draw_again()"},
        {"after": "train_loader.dataset.draw_again()"},
        {"by_batch": "if number == 5 and epoch > 1: optimizer.add_param_group({'params': others.parameters()})"},
    ],
    ids=lambda one: next(iter(one.values())),
)
def test_what_a_loop_changes_later_is_told_with_its_line(folder: Path, changed: dict[str, str]) -> None:
    loop = watched(folder, filled(CHANGED_LATER.format_map(NOT_AT_ALL | changed)))
    found = told(loop, "changes what a study keeps as in the first step")
    assert len(found) == 1
    assert found[0].count(" of train.py") == 1


READ_BY_THE_LOSS = {
    "a name of the file": """
        beta = 0.0
        def loss_of(x, y): return F.cross_entropy(net(x), y) + beta * net(x).pow(2).mean()
        for epoch in range(5):
            beta = min(1.0, epoch / 10)
            for x, y in train_loader:
                loss = loss_of(x, y)
                STEP
    """,
    "an attribute": """
        class Trainer:
            def loss(self, x, y): return F.cross_entropy(net(x), y) + self.weighted(net(x))
            def weighted(self, out): return self.beta * out.pow(2).mean()
            def fit(self):
                for epoch in range(5):
                    self.beta = min(1.0, epoch / 10)
                    for x, y in train_loader:
                        loss = self.loss(x, y)
                        STEP
        Trainer().fit()
    """,
}


WEIGHED_BY_AN_OBJECT = {
    "self.passes += 1": """
        class Annealer:
            def __init__(self): self.passes = 0
            def __call__(self, term): return term * min(1.0, self.passes / 3)
            def step(self): self.passes += 1
        annealer = Annealer()
        for epoch in range(5):
            for x, y in train_loader:
                out = net(x)
                loss = F.cross_entropy(out, y) + annealer(out.pow(2).mean())
                STEP
            annealer.step()
    """,
    "self.steps += 1": """
        class Annealed(nn.Module):
            def __init__(self): super().__init__(); self.steps = 0
            def forward(self, out, y): return F.cross_entropy(out, y) + min(1.0, self.steps / 30) * out.pow(2).mean()
            def step(self): self.steps += 1
        annealed = Annealed()
        for epoch in range(5):
            for x, y in train_loader:
                loss = annealed(net(x), y)
                STEP
            annealed.step()
    """,
    "self.value = min(1.0, self.value + 0.3)": """
        class Beta:
            def __init__(self): self.value = 0.0
            def step(self): self.value = min(1.0, self.value + 0.3)
        beta = Beta()
        for epoch in range(5):
            for x, y in train_loader:
                out = net(x)
                loss = F.cross_entropy(out, y) + beta.value * out.pow(2).mean()
                STEP
            beta.step()
    """,
}


@pytest.mark.parametrize("statement", WEIGHED_BY_AN_OBJECT)
def test_that_what_weighs_a_term_of_the_loss_becomes_another_is_told(folder: Path, statement: str) -> None:
    text = f"optimizer = torch.optim.Adam(net.parameters())\n{filled(WEIGHED_BY_AN_OBJECT[statement])}"
    found = told(watched(folder, text), "later in its run")
    assert len(found) == 1
    assert f": `{statement}` in line" in found[0]
    assert found[0].count(" of train.py") == 1


def test_what_a_trainer_counts_and_sums_up_beside_its_loss_is_not_told(folder: Path) -> None:
    text = """
        class Loss:
            def __init__(self): self.calls, self.shown = 0, 0
            def __call__(self, out, y): self.calls += 1; return F.cross_entropy(out, y)
            def show(self): self.shown += 1
        class Trainer:
            def __init__(self): self.epoch, self.total, self.best, self.loss = 0, 0.0, 9.0, Loss()
            def fit(self):
                for _ in range(5): self.train()
            def train(self):
                for x, y in train_loader:
                    loss = self.loss_of(x, y)
                    STEP
                    self.total = self.total + loss.item()
                self.loss.show()
                self.best = min(self.best, self.total)
                self.epoch += 1
            def loss_of(self, x, y):
                if self.epoch % 2 == 0: self.shown = self.epoch
                self.total += 1.0
                return self.loss(net(x), y)
        optimizer = torch.optim.Adam(net.parameters())
        Trainer().fit()
    """
    assert told(watched(folder, filled(text)), "later in its run") == []


@pytest.mark.parametrize("form", READ_BY_THE_LOSS)
def test_a_number_that_functions_of_the_loss_read_is_told_where_a_later_pass_has_another(
    folder: Path, form: str
) -> None:
    text = f"optimizer = torch.optim.Adam(net.parameters())\n{filled(READ_BY_THE_LOSS[form])}"
    assert "beta = min(1.0, epoch / 10)` in line" in told(watched(folder, text), "later in its run")[0]


OTHER_DATA = {
    "train_loader = loader_of((epoch + 1) / 5)": """
        def loader_of(share):
            return DataLoader(TensorDataset(X[: int(share * 60)], Y[: int(share * 60)]), batch_size=6, shuffle=True)
        for epoch in range(5):
            train_loader = loader_of((epoch + 1) / 5)
            for x, y in train_loader:
                loss = F.cross_entropy(net(x), y)
                STEP
    """,
    "train_set = read(name)": """
        def read(name): return TensorDataset(X, Y)
        for epoch in range(5):
            for name in ["first.pt", "second.pt"]:
                train_set = read(name)
                train_loader = DataLoader(train_set, batch_size=6, shuffle=True)
                for x, y in train_loader:
                    loss = F.cross_entropy(net(x), y)
                    STEP
    """,
    "for loader in [train_loader, other_loader]:": """
        def train(loader):
            for x, y in loader:
                loss = F.cross_entropy(net(x), y)
                STEP
        for epoch in range(5):
            for loader in [train_loader, other_loader]: train(loader)
    """,
    "train(other_loader)": """
        def train(loader):
            for x, y in loader:
                loss = F.cross_entropy(net(x), y)
                if x.is_cuda:
                    optimizer.zero_grad(); loss.backward()
                else:
                    optimizer.zero_grad(); loss.backward()
                optimizer.step()
        for epoch in range(5):
            train(train_loader)
            train(other_loader)
    """,
    "train_loader.dataset.noise = 0.1 * epoch": """
        for epoch in range(5):
            train_loader.dataset.noise = 0.1 * epoch
            for x, y in train_loader:
                loss = F.cross_entropy(net(x), y)
                STEP
    """,
    "train_set.noise = 0.0": """
        train_set = train_loader.dataset
        for epoch in range(5):
            if epoch == 3: train_set.noise = 0.0
            for x, y in train_loader:
                loss = F.cross_entropy(net(x), y)
                STEP
    """,
}


@pytest.mark.parametrize("statement", OTHER_DATA)
def test_that_later_rounds_have_other_data_is_told(folder: Path, statement: str) -> None:
    head = "other_loader, optimizer = DataLoader(TensorDataset(X, Y), 6), torch.optim.Adam(net.parameters())\n"
    found = told(watched(folder, head + filled(OTHER_DATA[statement])), "later in its run")
    assert len(found) == 1
    assert f": `{statement}` in line" in found[0]
    assert found[0].count(" of train.py") == 1


SAME_DATA = {
    "a bar around it": """
        for epoch in range(5):
            bar = Bar(train_loader, f"epoch {epoch}")
            for x, y in bar:
                loss = F.cross_entropy(net(x), y)
                STEP
    """,
    "phases by name": """
        phases = ["train", "val"]
        for epoch in range(5):
            for phase in phases:
                loader = {"train": train_loader, "val": val_loader}[phase]
                for x, y in loader:
                    loss = F.cross_entropy(net(x), y)
                    if phase == "train":
                        STEP
    """,
    "phases with their loaders": """
        for epoch in range(5):
            for phase, loader in {"train": train_loader, "val": val_loader}.items():
                for x, y in loader:
                    loss = F.cross_entropy(net(x), y)
                    if phase != "train": continue
                    STEP
    """,
    "a function for both": """
        def run(loader, optimizer=None):
            for x, y in loader:
                loss = F.cross_entropy(net(x), y)
                if optimizer is not None:
                    STEP
        for epoch in range(5):
            run(train_loader, optimizer)
            run(val_loader)
    """,
    "a loop over both": """
        def step(loss, trains):
            if not trains: return
            STEP
        def run(loader, trains):
            for x, y in loader:
                loss = F.cross_entropy(net(x), y)
                step(loss, trains)
        for epoch in range(5):
            for loader, trains in [(train_loader, True), (val_loader, False)]: run(loader, trains)
    """,
    "made alike for each pass": """
        for epoch in range(5):
            train_loader = DataLoader(TensorDataset(X, Y), batch_size=6, shuffle=True)
            train_loader.dataset.epoch = epoch
            for x, y in train_loader:
                loss = F.cross_entropy(net(x), y)
                STEP
    """,
    "a list of one": """
        loaders = [train_loader]
        for epoch in range(5):
            for loader in loaders:
                for x, y in loader:
                    loss = F.cross_entropy(net(x), y)
                    STEP
    """,
    "functions that are called by another name": """
        def timed(function):
            def run(*args): return function(*args)
            return run
        @timed
        def train(loader):
            for x, y in loader:
                loss = F.cross_entropy(net(x), y)
                STEP
        @timed
        def validate(loader): return sum(F.cross_entropy(net(x), y).item() for x, y in loader)
        for epoch in range(5):
            train(train_loader)
            validate(val_loader)
    """,
    "functions with their loaders": """
        def train(loader):
            for x, y in loader:
                loss = F.cross_entropy(net(x), y)
                STEP
        def validate(loader): return sum(F.cross_entropy(net(x), y).item() for x, y in loader)
        for epoch in range(5):
            for function, loader in [(train, train_loader), (validate, val_loader)]: function(loader)
    """,
    "one of two functions": """
        def train(loader):
            for x, y in loader:
                loss = F.cross_entropy(net(x), y)
                STEP
        def validate(loader): return sum(F.cross_entropy(net(x), y).item() for x, y in loader)
        for epoch in range(5):
            for loader in [train_loader, val_loader]:
                train(loader) if loader is train_loader else validate(loader)
    """,
    "a validation of its own": """
        def validate(loader): return sum(F.cross_entropy(net(x), y).item() for x, y in loader)
        def train(loader, validation):
            for x, y in loader:
                loss = F.cross_entropy(net(x), y)
                STEP
            validate(validation)
        for epoch in range(5):
            train(train_loader, val_loader)
            validate(val_loader)
    """,
}


@pytest.mark.parametrize("form", SAME_DATA)
def test_of_rounds_that_train_on_the_same_data_nothing_is_told(folder: Path, form: str) -> None:
    head = """
optimizer = torch.optim.Adam(net.parameters())
class Bar:
    def __init__(self, iterable, text): self.iterable, self.text = iterable, text
    def __iter__(self): return iter(self.iterable)
"""
    assert told(watched(folder, head + filled(SAME_DATA[form])), "later in its run") == []


@pytest.mark.parametrize(
    "changed",
    [
        {"before": "model.train(); train_set.set_epoch(epoch)"},
        {"after": "model.shown = epoch"},
        {"after": "model.eval()\n    with torch.no_grad(): accuracy = (model(X).argmax(1) == Y).float().mean().item()"},
        {"after": "if accuracy > best:\n        best = accuracy\n        torch.save(model.state_dict(), 'best.pt')"},
        {"before": "if args.debug: optimizer = torch.optim.SGD(model.parameters(), lr=0.01)"},
        {"by_batch": "for p in model.parameters(): p.grad = None"},
        {"by_batch": "if number % 5 == 0: print(epoch, loss.item())"},
        {"before": "for p in others.parameters(): p.requires_grad = False"},
        {"after": "def probe():\n        optimizer = torch.optim.SGD(others.parameters(), lr=0.1)\n        return optimizer\n    probe()"},
    ],
    ids=lambda one: next(iter(one.values())),
)  # fmt: skip
def test_what_leaves_the_training_as_it_is_is_not_told(folder: Path, changed: dict[str, str]) -> None:
    loop = watched(folder, filled(CHANGED_LATER.format_map(NOT_AT_ALL | changed)))
    assert told(loop, "later in its run") == told(loop, "another optimizer") == told(loop, "may end before") == []


TRAINS = """
def train(model, optimizer, passes):
    for epoch in range(passes):
        for phase in ["train", "val"]:
            for x, y in train_loader:
                loss = F.cross_entropy(model(x), y)
                if phase == "train":
                    STEP
def evaluate(model):
    model.eval()
    with torch.no_grad(): return F.cross_entropy(model(X), Y).item()
def attack(model, x, y):
    x.requires_grad_()
    F.cross_entropy(model(x), y).backward()
    return x + 0.1 * x.grad.sign()
def main(again):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train(net, optimizer, 5)
    {after}
main({again})
{at_the_end}
"""


@pytest.mark.parametrize(
    ("after", "again", "at_the_end", "is_told"),
    [
        ("train(net, torch.optim.SGD(net.parameters(), lr=0.01), 20)", True, "", True),
        ("if again: train(net, optimizer, 20)", True, "", True),
        ("for _ in range(3): train(net, optimizer, 20)", True, "", True),
        ("pass", True, "main(False)", True),
        (
            "pass",
            True,
            "for x, y in train_loader:\n    other.zero_grad(); net(x).mean().backward(); other.step()",
            True,
        ),
        ("if again: train(net, optimizer, 20)", False, "", False),
        ("evaluate(net); attack(net, X.clone(), Y)", False, "print(evaluate(net))", False),
        ("return\n    train(net, optimizer, 20)", False, "", False),
        ("torch.save(net.state_dict(), 'last.pt')", False, "def later(): main(False)", False),
    ],
)
def test_that_it_trains_again_is_told_with_the_line(
    folder: Path, after: str, again: bool, at_the_end: str, is_told: bool
) -> None:
    loop = watched(folder, filled(TRAINS.format(after=after, again=again, at_the_end=at_the_end)))
    assert keys_of(loop)["run_samples"] == 300
    assert len(told(loop, "it trains again after that, in line")) == is_told


ENDS = """
class Stopper:
    def __init__(self): self.bad, self.stop = 0, False
    def __call__(self, loss):
        self.bad += 1
        self.stop = self.bad > 3
        return self.stop
def validated(): return F.cross_entropy(net(X), Y).item()
args, stopper, best, best_epoch, bad, step, done = argparse.Namespace(debug=False, patience=0), Stopper(), 9.0, 0, 0, 0, False
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def run():
    global best, best_epoch, bad, step, done
    {loop}:
        for x, y in train_loader:
            loss = F.cross_entropy(net(x), y)
            STEP
            {by_batch}
        {by_pass}
run()
"""


@pytest.mark.parametrize(
    ("by_pass", "is_told"),
    [
        ("bad = 0 if validated() < best else bad + 1\n        if bad >= 3: break", True),
        ("if validated() < best: best_epoch = epoch\n        if epoch - best_epoch > 2: break", True),
        ("if stopper(validated()): break", True),
        ("stopper(validated())\n        if stopper.stop: return", True),
        ("loss = validated()\n        if loss < 0.1 and not args.debug: break", True),
        ("if epoch >= 500: break", False),
        ("if args.debug and validated() < 1: break", False),
        ("if args.patience and bad >= args.patience: break\n        bad = 0", False),
        ("step += 10\n        if step > 1000: break", False),
        ("if loss != loss or torch.isnan(loss): raise SystemExit", False),
        ("if torch.isnan(loss): break", False),
        ("try: validated()\n        except RuntimeError: break", False),
        ("best = min(best, validated())", False),
    ],
)  # fmt: skip
def test_that_a_run_may_end_early_is_told(folder: Path, by_pass: str, is_told: bool) -> None:
    text = ENDS.format(loop="for epoch in range(100)", by_batch="pass", by_pass=by_pass)
    loop = watched(folder, filled(text))
    assert keys_of(loop)["run_samples"] == 6000
    assert len(told(loop, "its run may end before its last round")) == is_told


@pytest.mark.parametrize(
    ("loop", "by_batch", "by_pass", "is_told"),
    [
        ("while True", "step += 1\n            if step >= 50:\n                done = True\n                break", "if done: break", False),
        ("while step < 50", "step += 1", "validated()", False),
        ("while step < 50 and not done", "step += 1", "done = validated() < 0.1", True),
        ("while True", "step += 1", "if step >= 50: break\n        if stopper(1.0): break", True),
    ],
)  # fmt: skip
def test_the_end_that_a_loop_counts_to_is_no_early_one(
    folder: Path, loop: str, by_batch: str, by_pass: str, is_told: bool
) -> None:
    found = watched(folder, filled(ENDS.format(loop=loop, by_batch=by_batch, by_pass=by_pass)))
    assert len(told(found, "its run may end before its last round")) == is_told


def test_collectives_give_what_one_process_has(folder: Path) -> None:
    text = """
        import torch.distributed as dist
        dist.init_process_group(dist.get_backend() if dist.is_initialized() else "gloo")
        group = dist.new_group([0])
        optimizer = torch.optim.Adam(net.parameters())
        for x, y in train_loader:
            loss = F.cross_entropy(net(x), y)
            STEP
            shown = loss.detach().clone()
            dist.all_reduce(shown, async_op=True).wait()
            dist.reduce(shown, dst=0, group=group)
            parts, all_of_them, names, some = [torch.zeros(())], torch.zeros(1), [None], [None]
            dist.all_gather(tensor_list=parts, tensor=shown)
            dist.all_gather_into_tensor(all_of_them, shown)
            dist.all_gather_object(names, "first")
            dist.gather_object({"a": 1}, some, dst=0)
            dist.broadcast_object_list(names, src=0)
            assert parts[0] == all_of_them[0] == loss and (names, some) == (["first"], [{"a": 1}])
    """
    assert keys_of(watched(folder, filled(text)))["optimizer"]["reference_batch_size"] == 6


def test_an_ordinary_script_is_told_nothing_of_later(folder: Path) -> None:
    """A schedule, a validation, the best weights, and a test after it."""
    text = """
        parser = argparse.ArgumentParser()
        parser.add_argument("--epochs", type=int, default=5)
        parser.add_argument("--dry-run", action="store_true")
        args = parser.parse_args()
        def train(args, model, loader, optimizer, epoch):
            model.train()
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                if number % 5 == 0:
                    print(f"epoch {epoch} [{number * len(x)}/{len(loader.dataset)}] {loss.item():.6f}")
                    if args.dry_run: break
        def test(model, loader):
            model.eval()
            total, correct = 0.0, 0
            with torch.no_grad():
                for x, y in loader:
                    out = model(x)
                    total += F.cross_entropy(out, y, reduction="sum").item()
                    correct += out.argmax(1).eq(y).sum().item()
            return total / len(loader.dataset), correct / len(loader.dataset)
        def main():
            optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
            best, history = 0.0, []
            for epoch in range(1, args.epochs + 1):
                train(args, net, train_loader, optimizer, epoch)
                loss, accuracy = test(net, val_loader)
                history.append(loss)
                if accuracy > best:
                    best = accuracy
                    torch.save({"epoch": epoch, "model": net.state_dict(), "best": best}, "best.pt")
                schedule.step()
            net.load_state_dict(torch.load("best.pt")["model"])
            print(test(net, val_loader))
        if __name__ == "__main__":
            main()
    """
    loop = watched(folder, text)
    assert keys_of(loop)["run_samples"] == 300
    assert settings_of(loop, None).told == ()


def test_parts_of_a_graph_with_a_row_for_each_sample_are_batches(folder: Path) -> None:
    """What is advised to who trains on a whole one."""
    text = """
        near = (torch.rand(60, 60) > 0.9).float()
        near /= near.sum(1, keepdim=True).clamp(min=1)
        class Around(torch.utils.data.Dataset):
            def __len__(self): return 60
            def __getitem__(self, place): return {"around": near[place], "y": Y[place]}
        optimizer = torch.optim.Adam(net.parameters())
        for batch in DataLoader(Around(), batch_size=6):
            loss = F.cross_entropy(net(batch["around"] @ X), batch["y"])
            STEP
    """
    watched(folder, filled(text))
    assert read(Source("script", "train.py", {"args": []})).keys["optimizer"]["reference_batch_size"] == 6
    assert script.made(script="train.py").micro_batch_size == 6
