"""One real forward and backward pass before anything is started, in a process of its own.

What a user's code does wrong there is said in seconds, and code that crashes, exits or hangs ends that process alone. So
it is the first to load the data, build the model and find the loss.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from pydantic import TypeAdapter
from torch import nn

from batchscout.trainers.before.apart import not_held_apart, whole_and_places
from batchscout.trainers.before.changing_loss import changing_with_calls, changing_with_steps
from batchscout.trainers.before.classes import Classes, ClassesSeen
from batchscout.trainers.before.digests import digest_of_model, digests_of_data
from batchscout.trainers.before.every_sample import look_for_targets, look_through
from batchscout.trainers.before.given import given_text
from batchscout.trainers.before.in_chunks import another_in_chunks
from batchscout.trainers.before.own_process import asked, own_process
from batchscout.trainers.before.pass_seconds import LONGEST_TO_REPEAT_SECONDS, pass_seconds
from batchscout.trainers.before.read_again import check_begins_anew, draws, others_when_read_again
from batchscout.trainers.before.tokens_of_weights import check_tokens
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.criteria import CrossEntropyCriterion, MeanLoss
from batchscout.trainers.data.batches import fetch, move
from batchscout.trainers.data.loaders import tells_lengths
from batchscout.trainers.data.order import of_every_part
from batchscout.trainers.data.samples import SAMPLES_LOOKED_AT, SampleSet, first_of, load_data
from batchscout.trainers.data.workers import named
from batchscout.trainers.device import cgroup
from batchscout.trainers.device.determinism import deterministic
from batchscout.trainers.device.device import pick_device
from batchscout.trainers.device.memory import memory_of
from batchscout.trainers.device.out_of_memory import is_out_of_memory
from batchscout.trainers.device.tensor_float import tensor_float_32
from batchscout.trainers.errors import DataFault, LossFault, raised_text, raised_where
from batchscout.trainers.model.adding_up import (
    Fault,
    buffers_kept,
    check_sum,
    evaluated,
    not_adding_up,
    not_apart,
    seeded,
)
from batchscout.trainers.model.contract import (
    NoLossAndCount,
    check_first_loss,
    check_is_the_models,
    check_is_trained,
    check_loss,
    check_shapes,
)
from batchscout.trainers.model.losses import LossFunction, autocasting, loss_function
from batchscout.trainers.model.models import initial_module
from batchscout.trainers.model.recomputation import BlocksAgain
from batchscout.trainers.notices import Notice, NoticeKind, give_notice, heard_by
from batchscout.trainers.sources.adapted import own_run_of
from batchscout.trainers.sources.kinds import HUGGING_FACE, is_overridden
from batchscout.trainers.sources.settings import OwnRun
from batchscout.trainers.step.optimizers import build_optimizer, fixed_rates

HERE = "batchscout.trainers.before.first_pass"
NUM_SAMPLES = 2
"""BatchNorm takes no single one."""
BYTES_PER_WEIGHT_BYTE = 3
"""A pass takes weights, gradients and activations; of weights that are frozen, themselves alone. A model for which there is not as
much is followed with fake tensors."""

Part = Literal["data", "model", "loss", "pass"]
PARTS: tuple[Part, ...] = get_args(Part)
"""Loading the data, building the model, finding the loss, and the pass."""


@dataclass(frozen=True)
class FirstPass:
    outcome: Literal["passed", "refused", "raised", "ended", "slow", "too_large"]
    """refused: the loss is not what a run can train on. raised: the user's code raised something. ended: the process crashed or
    exited. slow: the pass had not come to an end in time. too_large: there was no room for a real one."""
    part: Part
    """Where it came to that."""
    said: str = ""
    """passed: what people should know of the loss, if anything. refused: the message. raised: the exception, with its file and
    line. ended: the end of what the process had written to stderr; its stack, if it crashed."""
    exit_code: int = 0
    """How the process ended, as `subprocess` has it: where it ended, or was killed because there was no room."""
    given: str = ""
    """raised by the model or the loss: what the model's forward takes, and what the batch was."""
    targets_per_sample: float | None = None
    """passed: how many targets the first samples have on average."""
    adds_up: bool = True
    """passed: False where a batch has another loss, or gradient, than its samples one by one."""
    val_draws: bool = False
    """passed: True where the validation data draw random numbers, so that their batches are others with each size."""
    alone_raises: str | None = None
    """passed: what a single sample raises in training, as BatchNorm does; None where it does not."""
    seconds: tuple[float, float] | None = field(default=None, compare=False)
    """passed: what a forward and backward pass takes, whatever its size, and for each sample. None where it could not be timed."""
    differs_again: str | None = None
    """passed: how a block of the model that was run again on the same input differed; None where none did."""
    in_chunks: str | None = field(default=None, compare=False)
    """passed: how the model's loss is another with cross-entropy in chunks; "" where it is the same, None where nobody could tell."""
    digests: dict[str, str] = field(default_factory=dict, compare=False)
    """Of data and model, as that process has found them; none of what it did not come to."""
    own_run: OwnRun | None = field(default=None, compare=False)
    """Of a model that trains elsewhere, what it is set to there."""


def first_pass(config: TrialConfig, seconds: float, begins: Callable[[Part], object] = lambda _: None) -> FirstPass:
    """Return what came of a forward and a backward pass of the trial's model, on the device that this machine has. Notices
    that are given there are given here.

    seconds: how long the pass may take, without data and model. begins: is told each part as it begins.
    """
    known = dict[str, Any]()
    found = _followed(config, seconds, begins, known)
    own_run = TypeAdapter(OwnRun | None).validate_python(known.get("own_run"))
    return replace(found, digests=known.get("digests", {}), own_run=own_run)


def _followed(
    config: TrialConfig, seconds: float, begins: Callable[[Part], object], known: dict[str, Any]
) -> FirstPass:
    """Return what came of the process. known: where to put what it tells of data and model on its way."""
    ran_out, part, kills = threading.Event(), PARTS[0], cgroup.memory_kills()
    question = config.model_dump(mode="json")
    # A fault of a kernel on a GPU is raised where it was called.
    with own_process(HERE, question, CUDA_LAUNCH_BLOCKING="1") as process, contextlib.ExitStack() as deadline:

        def end() -> None:
            ran_out.set()
            process.end()

        for told in process.answers():
            if "known" in told:
                known |= told["known"]
                continue
            if "outcome" in told:
                told["seconds"] = told["seconds"] and tuple(told["seconds"])
                return FirstPass(**told)
            if "kind" in told:
                give_notice(NoticeKind(told["kind"]), told["text"])
                continue
            begins(part := told["part"])
            if part == "pass":
                timer = threading.Timer(seconds, end)
                timer.start()
                deadline.callback(timer.cancel)
        if ran_out.is_set():
            return FirstPass("slow", part)
        exit_code = process.exit_code()
        if exit_code == -signal.SIGKILL and cgroup.memory_kills() > kills:
            return FirstPass("too_large", part, exit_code=exit_code)
        return FirstPass("ended", part, _stack_of(process.last_words()), exit_code)


def _stack_of(said: str) -> str:
    """Return, of a crash, its stack, without the list of libraries that follows; of other last words all."""
    return said[max(0, said.rfind("Fatal Python error")) :].partition("\nExtension modules:")[0].strip()


def main() -> None:
    """Answer with each part as it begins, and with what came of the last."""
    faulthandler.enable(all_threads=False)
    with asked() as (question, answer):

        def tell(told: Part | FirstPass | Notice) -> None:
            answer({"part": told} if isinstance(told, str) else asdict(told))

        with heard_by(tell):
            for told in parts(TrialConfig.model_validate(question), lambda known: answer({"known": known})):
                tell(told)


def parts(
    config: TrialConfig, knows: Callable[[dict[str, Any]], object] = lambda _: None
) -> Iterator[Part | FirstPass]:
    """Do one part after the other: yield each as it begins, and then what came of it all. knows: is told what is known of data and model, by
    the fields of FirstPass."""
    device, part = pick_device(), PARTS[0]
    try:
        yield part
        check_tokens(config)
        train_set, val_set = load_data(config.data)
        first_train, first_val = first_of(train_set, SAMPLES_LOOKED_AT), first_of(val_set, SAMPLES_LOOKED_AT)
        digests = digests_of_data(train_set, val_set)
        knows({"digests": digests})
        check_begins_anew(train_set)
        check_begins_anew(val_set)
        yield (part := "model")
        module = initial_module(config, first_train)
        knows({"digests": digests | digest_of_model(module)})
        if (own_run := own_run_of(module)) is not None:
            knows({"own_run": TypeAdapter(OwnRun).dump_python(own_run, mode="json")})
        yield (part := "loss")
        loss = loss_function(config.loss)
        yield (part := "pass")
        with warnings.catch_warnings(), deterministic(config.deterministic), tensor_float_32(config.allow_tf32):
            warnings.simplefilter("ignore")
            found = _take(config, module, loss, first_train, first_val, device)
        yield found
    except (LossFault, DataFault) as error:
        yield FirstPass("refused", part, str(error))
    except GeneratorExit:  # nobody asks for more
        raise
    except BaseException as error:  # a user's code may raise anything
        yield _raised(error, part, device)


def _raised(error: BaseException, part: Part, device: torch.device, given: str = "") -> FirstPass:
    if is_out_of_memory(error, memory_of(device).free_bytes()):
        return FirstPass("too_large", part)
    return FirstPass("raised", part, raised_where(error), given=given)


def _take(
    config: TrialConfig,
    module: nn.Module,
    loss: LossFunction,
    train_set: SampleSet,
    val_set: SampleSet,
    device: torch.device,
) -> FirstPass:
    """Take the pass, and look whether the loss is a sum, and at the samples; where there is no room for that, follow it with fake
    tensors."""
    needed = sum(p.nbytes * (BYTES_PER_WEIGHT_BYTE if p.requires_grad else 1) for p in module.parameters())
    on_device = memory_of(device).free_bytes()
    if needed > (cgroup.available_bytes() if on_device is None else on_device):
        check_shapes(config, train_set)
        return FirstPass("too_large", "pass")
    module.to(device).train()
    loss = autocasting(loss, config.precision, device)
    indices = [number % len(train_set) for number in range(NUM_SAMPLES)]
    try:
        batch = fetch(train_set, indices)
    except DataFault:
        raise
    except Exception as error:
        return FirstPass(
            "refused", "data", f"{named(indices)} of the training data raised {raised_where(error)}; fix it"
        )
    if config.loss is None and not is_overridden(module, "forward", HUGGING_FACE):
        return FirstPass("refused", "pass", _needs_a_loss(config, batch))
    try:
        again = BlocksAgain(module, config.model.blocks)
    except ValueError as error:  # it has no blocks of that name
        return FirstPass("refused", "pass", str(error))
    classes, calls = ClassesSeen("a sample of the training data"), list[None]()
    hook = module.register_forward_pre_hook(lambda *_: calls.append(None))
    began = time.monotonic()
    try:
        with again.watched(), classes:
            returned = loss(module, move(copy.deepcopy(batch), device))  # which it may change
    except (LossFault, DataFault):
        raise
    except BaseException as error:
        hint = _without_a_loss(config) if isinstance(error, TypeError | AttributeError) else ""
        return _raised(error, "pass", device, f"{hint}{given_text(module, batch)}")
    finally:
        hook.remove()
    try:
        loss_sum, num_targets = check_loss(returned)
    except NoLossAndCount as error:
        return FirstPass("refused", "pass", f"{_without_a_loss(config)}{error}")
    check_is_trained(module, loss_sum)
    if own_run_of(module) is None:  # what trains elsewhere says itself what it trains
        check_is_the_models(module, loss_sum)
    check_first_loss(loss_sum.item(), num_targets.item())
    targets_per_sample = num_targets.item() / NUM_SAMPLES
    loss_sum.backward()
    seconds = time.monotonic() - began
    if (fault := _gradients_fault(config, module, is_called=bool(calls))) is not None:
        return FirstPass("refused", "pass", fault)
    is_short, sets = seconds < LONGEST_TO_REPEAT_SECONDS, {"training": train_set, "validation": val_set}
    found = _look_further(config, module, loss, sets, batch, classes, device, is_short=is_short)
    if found.outcome != "passed":
        return found
    return replace(found, targets_per_sample=targets_per_sample, differs_again=again.differed)


def _look_further(
    config: TrialConfig,
    module: nn.Module,
    loss: LossFunction,
    sets: Mapping[str, SampleSet],
    batch: Any,
    classes: ClassesSeen,
    device: torch.device,
    *,
    is_short: bool,
) -> FirstPass:
    """Return what further calls show of a model whose pass was well: of its samples, its optimizer, and of what changes with calls, steps and
    the split. batch: the first samples. is_short: whether a pass may be taken some times more."""
    train_set = sets["training"]
    # Before other calls bring a loss that counts them to its end.
    counted = changing_with_calls(module, loss, batch, device) if is_short else None
    _look_at_samples(config, module, loss, classes.found, sets, device)
    with classes:
        uncertain = check_sum(module, loss, train_set, device)
        try:
            rates = _fixed_rates(config, module)
        except ValueError as error:  # an optimizer that does not fit
            return FirstPass("refused", "pass", str(error))
        if (fault := changing_with_steps(module, loss, batch, device)) is not None:
            return FirstPass("refused", "pass", fault)
        found = not_adding_up(module, loss, train_set, device)
    if found is not None and isinstance(config.loss, MeanLoss):
        return FirstPass("refused", "pass", _is_no_such_mean(found, config.loss))
    added = _is_told(found) if found else None
    told = (
        lengths_not_taken(sets),
        not_held_apart(sets),
        others_when_read_again(sets),
        counted,
        rates,
        uncertain,
        added,
        not_apart(module, loss, train_set, config),
    )
    alone_raises = _raised_alone(module, loss, move(fetch(train_set, [0]), device), device)
    return FirstPass(
        "passed",
        "pass",
        ". ".join(filter(None, told)),
        seconds=pass_seconds(module, loss, train_set, device) if is_short else None,
        adds_up=found is None,
        val_draws=draws(sets["validation"]),
        alone_raises=alone_raises,
        in_chunks=another_in_chunks(module, config, move(batch, device)),  # the last: it changes the module
    )


def lengths_not_taken(sets: Mapping[str, SampleSet]) -> str | None:
    """Return, in words, that a set has `lengths` that are not those of its samples; None where none has."""
    wholes = {name: whole_and_places(samples)[0] for name, samples in sets.items()}
    has = (
        f"the {name} data"
        for name, whole in wholes.items()
        if getattr(whole, "lengths", None) is not None and not tells_lengths(whole)
    )
    named = " and ".join(has)
    return named and (
        f"{named} have `lengths` that are not one number for each sample, and are not taken for how long these are; where they are meant to be, "
        "make them so"
    )


def _look_at_samples(
    config: TrialConfig,
    module: nn.Module,
    loss: LossFunction,
    classes: Classes | None,
    sets: Mapping[str, SampleSet],
    device: torch.device,
) -> None:
    """Raise DataFault for a sample that no run can train on, or be judged by."""

    def figures_of(batch: Any) -> tuple[float, float]:
        return evaluated(module, loss, move(batch, device))

    def check_targets(batch: Any, what: str) -> None:
        if classes is not None and isinstance(config.loss, CrossEntropyCriterion):
            classes.check(batch[config.loss.targets if isinstance(batch, Mapping) else -1], what)

    for name, samples in sets.items():
        number = len(samples)
        indices = of_every_part(number, config.evaluation_samples) if name == "validation" else range(number)
        look_through(samples, name, indices, lambda batch: figures_of(batch)[0], check_targets)
        look_for_targets(samples, name, indices, lambda batch: figures_of(batch)[1])


def _without_a_loss(config: TrialConfig) -> str:
    if config.loss is not None:
        return ""
    return (
        "no `loss` is given, so the model is called with the whole batch and must return its loss: name what it is trained by (loss: "
        "cross_entropy, mse, bce_with_logits, mean, transformers, or your own as package.module:callable), if it returns outputs; "
    )


def _gradients_fault(config: TrialConfig, module: nn.Module, *, is_called: bool) -> str | None:
    """Return what of the gradients in place the training could not go on with. is_called: whether the loss has called the module itself."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if sparse := [name for name, p in trained.items() if p.grad is not None and p.grad.layout is not torch.strided]:
        return (
            f"the gradient of {_some(sparse)} is sparse, which neither clipping nor the gradient's statistics nor AdamW take; build its layer with "
            "sparse=False, which trains the same"
        )
    not_finite = [name for name, p in trained.items() if p.grad is not None and not p.grad.isfinite().all()]
    if not_finite and config.precision != "float16":  # whose gradients may overflow until the loss is scaled down
        return (
            f"the gradient of {_some(not_finite)} is no finite number, though the loss is one and no weight has moved; look for a square root, a norm, "
            "a logarithm or a division at 0 in forward and loss (torch.where hides the value there, and not its gradient)"
        )
    unused = [name for name, p in trained.items() if p.grad is None]
    if unused and config.world_size > 1 and config.parallel == "ddp":
        return (
            f"the loss does not depend on {len(unused)} of the model's {len(trained)} parameters ({_some(unused)}), and with world_size "
            f"{config.world_size} DDP waits for the gradient of each; freeze them (requires_grad_(False)) or leave them out of the model, or set "
            "parallel: fsdp, which waits for none"
        )
    if config.parallel == "fsdp" and not is_called:
        return (
            "the loss calls methods of the model and not the model itself, and parallel: fsdp gathers its weights when that is called; use "
            "parallel: ddp, or let the model's forward return the loss"
        )
    return None


MOST_NAMED = 3


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:MOST_NAMED])}{', ...' if len(names) > MOST_NAMED else ''}"


def _raised_alone(module: nn.Module, loss: LossFunction, batch: Any, device: torch.device) -> str | None:
    """Return what a single sample raises in training; None where it does not, or where there is no room to see it."""
    try:
        with seeded(module, 0), buffers_kept(module):
            evaluated(module, loss, batch, training=True)
    except Exception as error:
        return None if is_out_of_memory(error, memory_of(device).free_bytes()) else raised_text(error)
    return None


def _needs_a_loss(config: TrialConfig, batch: object) -> str:
    keys = list(batch) if isinstance(batch, Mapping) else []
    remedy = "loss: {type: cross_entropy, targets: targets}" if "targets" in keys else "loss: transformers"
    return (
        f"model.target '{config.model.target}' is a transformers model, whose forward takes the members of a batch by their names and returns "
        f"no sum of losses; say {remedy} in the study file"
    )


def _is_no_such_mean(found: Fault, loss: MeanLoss) -> str:
    return (
        f"loss: mean is taken for a mean over {loss.over}, and then {found}: it is a mean over something else, or no sample has a loss of "
        "its own; say what it is a mean over (over: targets, samples, or your own count as package.module:callable: of class weights their "
        "sum), or return the sum and the number of targets"
    )


def _is_told(found: Fault) -> str:
    return (
        f"{found}: a batch trains differently when it is split, so candidates with micro-batches of different sizes train by different "
        "losses. If that is not meant, let each sample have its own loss and return their sum"
    )


def _fixed_rates(config: TrialConfig, module: nn.Module) -> str | None:
    """Return, in words, which groups of the optimizer do not follow the run's learning rate; None where all do. Raises ValueError where none
    does, or the optimizer does not fit.

    To make one loads torch's compiler, which takes a second: what AdamW and SGD take without further arguments fits any model."""
    own = config.optimizer
    if own.type in ("adamw", "sgd") and not own.kwargs:
        return None
    if own.type != "own":
        build_optimizer(module, config)
        return None
    fixed, number = fixed_rates(module, config)
    rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(fixed))
    if number and len(fixed) == number:
        raise ValueError(
            f"optimizer.target {own.target} trains at the learning rate {rates} whether it is called with lr={config.learning_rate:g} or with "
            f"lr={2 * config.learning_rate:g}, so a study would compare rates that change nothing; hand `lr` on to the optimizer"
        )
    return (
        f"optimizer.target {own.target} keeps the learning rate of {len(fixed)} of its {number} groups ({rates}), whatever `lr` it is called "
        "with, and the study changes that of the others alone: if that is not meant, give these a multiple of `lr`"
        if fixed
        else None
    )


if __name__ == "__main__":
    main()
