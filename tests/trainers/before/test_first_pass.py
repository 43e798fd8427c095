"""What a user's code does wrong in its first pass is known before anything is started, whatever it is."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchscout.orchestrator.execution.process_endings import wait_for_end
from batchscout.trainers.before import first_pass as module
from batchscout.trainers.before.first_pass import PARTS, FirstPass, first_pass
from batchscout.trainers.before.given import given_text
from batchscout.trainers.criteria import MeanLoss
from batchscout.trainers.device import cgroup
from batchscout.trainers.model.adding_up import buffers_kept
from batchscout.trainers.notices import Notice, NoticeKind, give_notice, heard_by
from tests.support.processes import HANGS_AFTER_SECONDS, read
from tests.support.tiny import ROOT, Samples, config, data

pytestmark = pytest.mark.slow  # each starts a process


class Faulty(nn.Module):
    """A user's module that does in its forward what it is told."""

    def __init__(self, *, vocab_size: int, does: str) -> None:
        super().__init__()
        self.table, self.does = nn.Embedding(vocab_size, vocab_size), does

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        match self.does:
            case "crash":
                ctypes.string_at(0)
            case "exit":
                print("a user's code may print", flush=True)
                os._exit(3)
            case "fork and exit":
                if helper := os.fork():
                    Path(os.environ["NOTE"]).write_text(str(helper))
                    os._exit(3)
                time.sleep(600)
            case "hang":
                Path(os.environ.get("NOTE", os.devnull)).write_text(str(os.getpid()))
                time.sleep(600)
            case "take all memory":
                torch.empty(1 << 50)
        logits = self.table(batch["words"] if self.does == "look for words" else batch["input_ids"])
        logits = logits + getattr(self.table, "bias", 0.0)
        return logits.mean() if self.does == "return a mean" else logits.sum(), torch.tensor(logits.shape[0])


def passed_by(does: str, seconds: float = HANGS_AFTER_SECONDS, **changes: Any) -> FirstPass:
    model = {"target": "tests.trainers.before.test_first_pass:Faulty", "kwargs": {"does": does}}
    return first_pass(config(model=model, **changes), seconds)


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        ("nothing wrong", FirstPass("passed", "pass", targets_per_sample=1.0)),
        ("exit", FirstPass("ended", "pass", "a user's code may print", 3)),
        ("take all memory", FirstPass("too_large", "pass")),
    ],
)
def test_how_it_ended_is_told(does: str, expected: FirstPass) -> None:
    assert passed_by(does) == expected


class Untrainable(nn.Module):
    """A user's module of which no run learns anything, each for another reason."""

    def __init__(self, *, why: str) -> None:
        super().__init__()
        self.why = why
        if why != "no parameters":
            self.weight = nn.Parameter(torch.ones(4), requires_grad=why != "frozen")

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        ids = batch["input_ids"].float()
        none, scale = torch.zeros(()), self.weight.sum() if self.why != "no parameters" else torch.ones(())
        match self.why:
            case "cut off":
                scale = scale.detach()
            case "no number":
                scale = scale / none * none
            case "gradient":
                scale = scale + torch.sqrt(scale - scale)
            case "mean over none":
                return scale * none / none * none, none.long()
            case _:
                pass
        return (ids.sum() + 1) * scale, torch.tensor(ids.numel())


@pytest.mark.parametrize(
    ("why", "facts"),
    {
        "no parameters": ["the model has no parameters"],
        "frozen": ["the model trains no parameter of its own (1 in all)", "requires_grad_(True)"],
        "cut off": ["depends on no parameter that the model trains (1 in all)", "detach()"],
        "no number": ["is nan, before any weight has moved"],
        "gradient": ["the gradient of weight is no finite number"],
        "mean over none": ["samples without targets is nan", 'reduction="sum"'],
    }.items(),
)
def test_a_model_that_cannot_be_trained_is_refused_with_the_reason(why: str, facts: list[str]) -> None:
    model = {"target": "tests.trainers.before.test_first_pass:Untrainable", "kwargs": {"why": why}}
    found = first_pass(config(model=model), 60.0)
    assert found.outcome == "refused"
    assert all(fact in found.said for fact in facts), found.said


CALLS_OF_LOSS: list[None] = []


def loss_by_its_calls(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss_sum, num_targets = module(batch)
    CALLS_OF_LOSS.append(None)
    return loss_sum * (1 + len(CALLS_OF_LOSS) / 1000), num_targets


class ByItsCounter(Faulty):
    """Its counter of forwards is a buffer, as it is saved."""

    def __init__(self, *, vocab_size: int) -> None:
        super().__init__(vocab_size=vocab_size, does="nothing wrong")
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        self.calls += 1
        loss_sum, num_targets = super().forward(batch)
        return loss_sum * (1 - self.calls / 1000), num_targets


def test_a_loss_that_counts_its_calls_is_told() -> None:
    by_calls = passed_by("nothing wrong", loss=f"{__name__}:loss_by_its_calls")
    by_buffer = first_pass(config(model={"target": f"{__name__}:ByItsCounter"}), 60.0)
    for found in (by_calls, by_buffer):
        assert (found.outcome, "how often it was called" in found.said) == ("passed", True)


def loss_of_what_it_scales(module: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    loss_sum, num_targets = module(batch)
    batch["scale"] = batch["scale"].mul_(1.01) if "scale" in batch else torch.ones(())
    return loss_sum * batch["scale"], num_targets


def test_a_loss_that_changes_its_batch_is_not_taken_for_one_that_counts_its_calls() -> None:
    found = passed_by("nothing wrong", loss="tests.trainers.before.test_first_pass:loss_of_what_it_scales")
    assert (found.outcome, found.said) == ("passed", "")


def test_a_pass_that_hangs_is_ended() -> None:
    assert passed_by("hang", seconds=0.5) == FirstPass("slow", "pass")


def test_a_crash_is_told_with_its_stack() -> None:
    found = passed_by("crash")
    assert (found.outcome, found.exit_code) == ("ended", -signal.SIGSEGV)
    assert re.search(rf'File "{ROOT}/tests/trainers/before/test_first_pass\.py", line \d+ in forward', found.said)


def test_what_it_raised_is_told_with_its_file_and_line() -> None:
    found = passed_by("look for words")
    assert (found.outcome, found.part) == ("raised", "pass")
    assert re.fullmatch(
        rf"KeyError: 'words' \(in {ROOT}/tests/trainers/before/test_first_pass\.py, line \d+\)", found.said
    )


class OfTwo(nn.Module):
    """A user's module whose forward takes what the batch has under other names."""

    def __init__(self, *, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, 1)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return (self.table(tokens).squeeze(-1) - labels).square().sum(), torch.tensor(labels.numel())


def test_what_the_forward_takes_is_told_beside_what_it_was_given() -> None:
    """Torch's own file and line, in which a call that does not fit is raised, tell nobody what to mend."""
    found = first_pass(config(model={"target": "tests.trainers.before.test_first_pass:OfTwo"}), 60.0)
    assert found.said.startswith("TypeError: OfTwo.forward() missing 1 required positional argument: 'labels'")
    assert re.search(
        r"; its forward takes \(tokens, labels\), and a batch of samples is a dictionary of "
        r"input_ids: int64 \[2, \d+\] from \d+ to \d+, targets: int64 \[2, \d+\] from \d+ to \d+$",
        found.given,
    )


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (torch.ones(2, 3), "float32 [2, 3]"),
        (torch.eye(2, dtype=torch.int64).to_sparse(), "int64 [2, 2]"),
        ([torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)], "a list of NestedTensor"),
        ((torch.zeros(2, 0, dtype=torch.int32), "word"), "a tuple of int32 [2, 0], str"),
        ({f"k{number}": torch.tensor([True]) for number in range(14)}, "k11: bool [1] and 2 more"),
    ],
)
def test_a_batch_is_described_whatever_it_is(batch: object, said: str) -> None:
    assert given_text(OfTwo(vocab_size=2), batch).endswith(said)


def test_a_forward_that_does_not_tell_what_it_takes_hides_nothing_else() -> None:
    module = OfTwo(vocab_size=2)
    module.forward = min  # pyright: ignore[reportAttributeAccessIssue]  (written in C, without a signature)
    assert (
        given_text(module, torch.ones(1))
        == "its forward takes what it does not tell, and a batch of samples is float32 [1]"
    )


def test_a_mean_is_refused() -> None:
    found = passed_by("return a mean")
    assert found.outcome == "refused"
    assert "for two equal ones: it is a mean" in found.said


def llama(vocab_size: int) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[hf]'")
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocab_size, **sizes))


def test_a_transformers_model_without_a_loss_is_refused_with_the_one_that_its_data_have() -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[hf]'")
    model = {"target": "tests.trainers.before.test_first_pass:llama"}
    found = first_pass(config(model=model), 60.0)
    assert found.outcome == "refused"
    assert found.said.endswith(
        "returns no sum of losses; say loss: {type: cross_entropy, targets: targets} in the study file"
    )
    loss = {"type": "cross_entropy", "targets": "targets"}
    assert first_pass(config(model=model, loss=loss), 60.0).outcome == "passed"


def test_a_mean_over_something_else_is_refused_with_both_numbers() -> None:
    trial = config(
        padded=True,
        model={"target": "tests.trainers.model.test_losses:MeanOfTargets"},
        loss={"type": "mean", "over": "samples"},
    )
    found = first_pass(trial, 60.0)
    assert found.outcome == "refused"
    assert re.match(
        r"loss: mean is taken for a mean over samples, and then the model's loss_sum of 4 samples is [\d.]+ in one batch, and "
        r"[\d.]+ added up one by one: it is a mean over something else, or no sample has a loss of its own; say what it is",
        found.said,
    )
    right = trial.model_copy(update={"loss": MeanLoss(targets="targets")})
    assert first_pass(right, 60.0) == FirstPass("passed", "pass", targets_per_sample=5.5)


def test_data_that_do_not_load_end_it() -> None:
    found = passed_by("nothing wrong", data={"target": "text", "kwargs": {"train": "no.txt"}})
    assert (found.outcome, found.part) == ("raised", "data")


def test_a_helper_that_the_users_code_has_forked_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the pipe through which its parent spoke, too."""
    monkeypatch.setenv("NOTE", str(note := tmp_path / "pid"))
    assert passed_by("fork and exit") == FirstPass("ended", "pass", "", 3)
    assert read(Path(f"/proc/{note.read_text()}/cmdline")) == ""


def test_a_model_without_room_is_followed_without_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BYTES_PER_WEIGHT_BYTE", 1 << 60)
    assert list(module.parts(config())) == [*PARTS, FirstPass("too_large", "pass")]
    (*_, found) = module.parts(config(loss="mse"))
    assert isinstance(found, FirstPass)
    assert (found.outcome, "a batch has no 'labels'" in found.said) == ("refused", True)


def test_frozen_weights_need_room_for_themselves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Faulty(vocab_size=24, does="nothing wrong")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(cgroup, "available_bytes", lambda: 2 * weights)
    monkeypatch.setattr(module, "initial_module", lambda *_: model)
    *_, trained = module.parts(config())
    model.table.requires_grad_(False).bias = nn.Parameter(torch.zeros(1))
    *_, adapted = module.parts(config())
    assert [found.outcome for found in (trained, adapted) if isinstance(found, FirstPass)] == ["too_large", "passed"]


LOADED = """
import sys
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.before.first_pass import parts
print(list(parts(TrialConfig.model_validate_json(sys.argv[1])))[-1].outcome)
print(*(name for name in ("torch._dynamo", "sympy", "torch.distributed.tensor") if name in sys.modules))
"""


def test_it_waits_for_no_library_that_a_pass_does_not_need(tmp_path: Path) -> None:
    """The compiler and sharding take longer to import than torch itself, and every new study waits for the pass."""
    (text := tmp_path / "words.txt").write_text("all the words of a text\n" * 50)
    kwargs = {"train": str(text), "tokenizer": "bytes", "seq_len": 8}
    trial = config(data={"target": "text", "kwargs": kwargs}, model={"target": "gpt", "kwargs": {"num_layers": 1}})
    code = [sys.executable, "-c", LOADED, trial.model_dump_json()]
    done = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["passed", "", ""]


def test_it_does_not_outlive_whoever_asked(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = "from tests.trainers.before.test_first_pass import passed_by; passed_by('hang')"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "NOTE": str(note)}) as asker:
        while not note.exists() or not note.read_text():
            assert asker.poll() is None
            time.sleep(0.05)
        process = os.pidfd_open(int(note.read_text()))
        asker.kill()
    assert wait_for_end(process, seconds=HANGS_AFTER_SECONDS)
    os.close(process)


def killed_for_want_of_memory() -> Samples:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_a_kill_for_want_of_memory_is_told_from_room_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked would be killed, too, if it did the same."""
    kills = iter(range(2))
    monkeypatch.setattr(cgroup, "memory_kills", lambda: next(kills))
    found = passed_by("nothing wrong", data={"target": f"{__name__}:{killed_for_want_of_memory.__name__}"})
    assert found == FirstPass("too_large", "data", exit_code=-signal.SIGKILL)


def gives_a_notice(**kwargs: Any) -> tuple[Samples, Samples]:
    give_notice(NoticeKind.REBUILT_DATA, "the tokens were made again")
    return data(**kwargs)


def test_notices_of_its_process_and_the_parts_as_they_begin_are_heard_here() -> None:
    """The data cache that is made again there is whole when this process looks."""
    heard, begun = list[Notice](), list[str]()
    trial = config(data={"target": f"{__name__}:gives_a_notice"})
    with heard_by(heard.append):
        first_pass(trial, 60.0, begun.append)
    assert heard == [Notice(NoticeKind.REBUILT_DATA, "the tokens were made again")]
    assert begun == [*PARTS]


def test_what_a_forward_that_raises_has_moved_is_undone() -> None:
    """BatchNorm over vectors raises on a single one, after it has taken it into its statistics."""

    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            self.norm(values)
            raise ValueError("after all")

    module = Raises()
    with pytest.raises(ValueError, match="after all"), buffers_kept(module):
        module(torch.randn(4, 3) + 5)
    assert module.norm.running_mean is not None
    assert module.norm.running_mean.eq(0).all()
    assert module.norm.num_batches_tracked == 0
