"""Finds what is bound to fail before anything is started, and says so in the user's words."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from batchscout.orchestrator.config.keys import StudyConfig, given_batch
from batchscout.orchestrator.config.stages import Equivalence, Frontier, Grid
from batchscout.orchestrator.config.trial import base_trial
from batchscout.orchestrator.environment import (
    beyond_memory,
    host_bytes,
    observed_environment,
    obstacles_here,
    refuse,
)
from batchscout.orchestrator.signals import interrupt_has_come
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.cost import samples_per_second
from batchscout.orchestrator.stages.frontier.checkpointing import why_not_checkpointed
from batchscout.orchestrator.stages.frontier.modes import predicted_modes, prediction_key
from batchscout.orchestrator.stages.frontier.probes import smallest_size
from batchscout.orchestrator.stages.frontier.too_small import check_fits
from batchscout.orchestrator.stages.frontier.unpredicted import unpredicted_texts
from batchscout.orchestrator.stages.grid import propose, skipped
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.units import bytes_text, counted, ending_text, exit_text, shortened
from batchscout.trainers.before.peak_memory import PeakMemory
from batchscout.trainers.config import TrialConfig
from batchscout.trainers.counted import Counted
from batchscout.trainers.criteria import TransformersLoss, import_path
from batchscout.trainers.device import cgroup
from batchscout.trainers.errors import raised_text, users_frame
from batchscout.trainers.files import StorageLost, naming_the_disk, quoted
from batchscout.trainers.knobs import KNOBS, check_machine, chunked_cross_entropy
from batchscout.trainers.notices import NoticeKind, give_notice

if TYPE_CHECKING:
    from torch import nn

    from batchscout.trainers.before.first_pass import FirstPass, Part
    from batchscout.trainers.data.samples import Samples, SampleSet

SHARE_OF_HOST = 0.9
MANY_SECONDS = 20.0
"""Data and models that take longer are named."""
SECONDS_OF_A_PASS = 30.0
SECONDS_OF_READING = 4.0
"""For the sizes of samples that the data do not tell."""
_DEBUG = "check the values, or debug it with batchscout trial"
# So many characters of an error of the user's code are shown.
MOST_OF_AN_ERROR = 300
# So many of what a crashed process wrote.
MOST_OF_AN_ENDING = 1_500


@contextlib.contextmanager
def _leaving_the_gpu() -> Iterator[None]:
    """Give back, once what this wraps has returned, what the user's code has put on a GPU in this process: it lives as long as the study, and
    the memory is that of the study's runs."""
    import torch

    yield
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@_leaving_the_gpu()
def check(
    config: StudyConfig,
    *,
    compiles: bool,
    say: Callable[[str], object] = lambda _: None,
    seconds: float = MANY_SECONDS,
    targets_per_sample: float | None = None,
    is_new: bool = False,
    follows: bool = False,
) -> Facts:
    """Load the data, build the model, look for the compiler; return the facts that hold for the whole study.

    compiles: True if this machine will compile; on a cluster other nodes than this one may do so. say: what tells people
    that the data or the model have not come after so many seconds. targets_per_sample: None where it is not known. is_new: True
    where the study begins, and its trials depend on what is found. follows:
    True if the model's forward may be called in this process, to see which memory knobs go with it: it did not end the
    process of the first pass. Raises ValueError for bad input.
    """
    from batchscout.trainers.before.digests import digest_of_model, digests_of_data, num_validated_on_training
    from batchscout.trainers.data.batches import fetch
    from batchscout.trainers.data.samples import first_of, load_data, num_samples
    from batchscout.trainers.data.targets import counted_in
    from batchscout.trainers.model.blocks import find_blocks
    from batchscout.trainers.model.losses import loss_function
    from batchscout.trainers.model.models import num_batch_norms, regularizers

    check_compiler(compiles)
    what = _data_of(config)
    with _in_the_users_words(what), _told_if_slow(what, say, seconds):
        train_set, val_set = load_data(config.data)
        check_size(config, train_set)
        _check_stream(config, train_set)
        longest = _longest_sample(config, train_set)
        contents = digests_of_data(train_set, val_set)
        num_shared = num_validated_on_training(train_set, val_set)
        fetch(first_of(train_set, 1), [0])  # what a sample raises is not the model's fault, which is asked next
    what = _model_of(config)
    with _in_the_users_words(what), _told_if_slow(what, say, seconds):
        model = _built(config, train_set)
        contents |= digest_of_model(model)
    with _in_the_users_words(_loss_of(config)):
        loss_function(config.loss)  # an import path may not resolve
    with _in_the_users_words(what):
        facts = Facts(
            num_train_samples=num_samples(train_set),
            num_val_samples=num_samples(val_set),
            longest_sample=longest,
            num_parameters=sum(p.numel() for p in model.parameters()),
            num_batch_norms=num_batch_norms(model),
            num_blocks=len(find_blocks(model, config.model.blocks)),
            counted=counted_in(first_of(train_set, 1), targets_per_sample),
            regularizers=regularizers(config.model),
            chunked_cross_entropy=config.model.target == "gpt",
            contents=contents,
            memory_knobs=_knobs_to_try_unasked(config, first_of(train_set, 1)) if follows else None,
        )
    if is_new:
        _check_lengths(config)
        with _in_the_users_words(_data_of(config)):
            facts = replace(facts, long_samples=_long_samples(train_set, say))
        _check_limit(config, model)
    _tell_of_an_unused_optimizer(config, model)
    _tell_of_one_validation_sample(config, len(first_of(val_set, max(2, config.evaluation_samples))))
    _tell_of_few_training_samples(config, facts.num_train_samples)
    _tell_of_validation_on_training_data(num_shared)
    return facts


def _tell_of_an_unused_optimizer(config: StudyConfig, model: nn.Module) -> None:
    from batchscout.trainers.sources.kinds import LIGHTNING, is_lightning_module, is_overridden

    if is_lightning_module(model) and is_overridden(model, "configure_optimizers", LIGHTNING):
        give_notice(
            NoticeKind.UNUSED_OPTIMIZER,
            f"model.target '{config.model.target}' is a LightningModule, and its configure_optimizers is not used: trials train with the "
            f"study file's optimizer ({config.optimizer.name}). To train with the module's own, name a callable that returns the module "
            "and its data in from: {lightning: package.module:callable}, in place of model, loss and data",
        )


def _tell_of_one_validation_sample(config: StudyConfig, num_there: int) -> None:
    if min(num_there, config.evaluation_samples) == 1:
        give_notice(
            NoticeKind.ONE_VALIDATION_SAMPLE,
            f"the validation loss is that of one sample (the validation set has {num_there}, and evaluation_samples is "
            f"{config.evaluation_samples}), so it ranks batches and rates by chance; "
            + ("add validation data" if num_there == 1 else "raise evaluation_samples"),
        )


def _tell_of_validation_on_training_data(num_shared: int) -> None:
    if num_shared:
        give_notice(
            NoticeKind.VALIDATES_ON_TRAINING,
            f"the first {num_shared} validation samples are training samples, so a low validation loss may come from memorised samples; validate on samples that are not "
            "trained on, or leave the validation set out where the source holds some out by itself",
        )


FEW_SAMPLES = 1000
MANY_PASSES = 40
"""By then a repeated sample is worth nothing to a language model (Muennighoff et al. 2023, arXiv 2305.16264). Sets of more than FEW_SAMPLES
may be met as often with changes drawn at random, as pictures are."""


def _tell_of_few_training_samples(config: StudyConfig, num_there: int | None) -> None:
    budget = config.sample_budget
    if num_there is not None and num_there < FEW_SAMPLES and budget > MANY_PASSES * num_there:
        give_notice(
            NoticeKind.FEW_TRAINING_SAMPLES,
            f"runs see each of the {counted(num_there, 'training sample')} {budget / num_there:,.0f} times (sample_budget is {budget:,}), and "
            "memorise them, so the best batch says little about other data; add training data or lower sample_budget",
        )


def _long_samples(train_set: Samples, say: Callable[[str], object]) -> tuple[int, ...] | None:
    """Return the longest training samples, where they differ in size and nobody says how long they are."""
    from batchscout.trainers.data.long_samples import long_samples
    from batchscout.trainers.data.samples import num_samples

    found, num_there = long_samples(train_set, SECONDS_OF_READING), num_samples(train_set)
    if found is None or not found.indices or num_there is None:
        return None
    if found.num_looked_at < num_there:
        say(
            f"the training samples differ in size, and {found.num_looked_at:,} of {num_there:,} were looked at in {SECONDS_OF_READING:g} s: "
            "among the others may be longer ones, for which a micro-batch that fits here is too large; give the set `lengths`, one number "
            "for each sample"
        )
    return found.indices


def _longest_sample(config: StudyConfig, train_set: Samples) -> int | None:
    """Return the tokens of the longest training sample, where micro-batches are cut by tokens. Raises ValueError where the budget does not hold
    the micro-batch sizes that the study file asks for."""
    from batchscout.trainers.data.micro_batches import check_tokens
    from batchscout.trainers.data.streams import Stream

    if config.micro_batch is None:
        return None
    assert not isinstance(train_set, Stream), "it was refused"
    return int(check_tokens(config.micro_batch, max(_sizes_asked_for(config)), train_set).max())


def _check_lengths(config: StudyConfig) -> None:
    """Raise ValueError where the frontier is to try lengths of samples that the data's target does not take."""
    from batchscout.trainers.data.samples import takes_seq_len

    frontier = config.keys_of(Frontier)
    if frontier is not None and frontier.seq_len and not takes_seq_len(config.data):
        raise ValueError(
            f"stages.frontier.seq_len is {', '.join(map(str, frontier.seq_len))}, and data.target '{config.data.target}' takes no seq_len; "
            "give it that argument, or leave seq_len out"
        )


def _sizes_asked_for(config: StudyConfig) -> list[int]:
    """Return the micro-batch sizes that the study file names. A frontier goes no further than the budget, from its smallest."""
    frontier, grid, equivalence = config.keys_of(Frontier), config.keys_of(Grid), config.keys_of(Equivalence)
    return [
        _given_size(config),
        *((frontier.smallest,) if frontier else ()),
        *(grid.micro_batch_size if grid else ()),
        *(equivalence.micro_batch_sizes if equivalence else ()),
    ]


def _built(config: StudyConfig, train_set: Samples) -> nn.Module:
    """Build the model with the weights that runs are to begin with, to see that they are its own."""
    from batchscout.trainers.model.models import initial_module

    trial = base_trial(config, None)
    weights = trial.initial_weights
    with naming_the_disk(Path(weights), "read") if weights is not None else contextlib.nullcontext():
        return initial_module(trial, train_set)


def _knobs_to_try_unasked(config: StudyConfig, train_set: SampleSet) -> tuple[str, ...] | None:
    """Return the memory knobs that a frontier tries without being told, as the model goes with them; None where it tries none. Raises
    ValueError where a knob that the study file names needs a layer that the model has not."""
    from batchscout.trainers.model.knobs import head_if_wanted

    frontier, trial = config.keys_of(Frontier), base_trial(config, None)
    named = {*config.named_knobs}
    if named:
        head_if_wanted(trial.model_copy(update={"memory_knobs": tuple(sorted(named))}), train_set)
    if frontier is None or frontier.memory_knobs is not None or config.model.target == "gpt":  # gpt has a variant
        return None
    unasked = [
        one for one in KNOBS if one.tried_by_itself and not one.incompatible_with(trial) and one.name not in named
    ]
    found = [one.name for one in unasked if _goes(trial.model_copy(update={"memory_knobs": (one.name,)}), train_set)]
    return tuple(found) or None


def _without_another_loss(
    unasked: tuple[str, ...] | None, config: StudyConfig, in_chunks: str | None
) -> tuple[str, ...] | None:
    """Return those of the knobs to try unasked that are sure to train the same loss. in_chunks: of FirstPass. Raises ValueError where the
    study file names cross-entropy in chunks, and it is another.

    A model of transformers may add to the cross-entropy of its logits. Where its loss could not be compared, it is not tried unasked.
    """
    name = chunked_cross_entropy.NAME
    if in_chunks and name in config.named_knobs:
        raise ValueError(
            f"memory_knobs has {name}, which is to change no number, and with this model it does: {in_chunks}. What the model adds to "
            "the cross-entropy of its logits (a router's balance, a z-loss), or does to them after their layer, is left out; leave "
            f"{name} out of memory_knobs"
        )
    is_same = in_chunks == "" or (in_chunks is None and not isinstance(config.loss, TransformersLoss))
    return unasked if is_same else tuple(one for one in unasked or () if one != name) or None


def _goes(trial: TrialConfig, train_set: SampleSet) -> bool:
    """True if the model has the layer that a knob needs. Nobody has asked for it, so nobody is told why not."""
    from batchscout.trainers.model.knobs import head_if_wanted

    try:
        head_if_wanted(trial, train_set)
    except ValueError:
        return False
    return True


def check_new_study(config: StudyConfig, *, is_local: bool, compiles: bool, say: Callable[[str], object]) -> Facts:
    """Do as `check`, and look for what only a study that begins can be refused for: see that the model has what it is to be
    checkpointed by, and take a forward and a backward pass of it in a process of its own.

    That process is the first to run the user's code: what ends it would end this one, without a word. is_local: True if runs
    will be on this machine; what a pass raises here, another device might not. say: what tells people of what is no fault.
    """
    check_compiler(compiles)
    found = _first_pass(config, say)
    if found.outcome == "refused":
        raise ValueError(found.said)
    what = _named(found.part, config)
    if found.part != "pass" and _has_ended_its_process(found):
        raise ValueError(f"{what} {_how_it_failed(found)}")
    follows = found.outcome != "raised" and not _has_ended_its_process(found)
    facts = check(
        config, compiles=compiles, say=say, targets_per_sample=found.targets_per_sample, is_new=True, follows=follows
    )
    contents = facts.contents
    if contents and found.digests:
        contents = _steady_contents(contents, found.digests)
    facts = replace(
        facts,
        memory_knobs=_without_another_loss(facts.memory_knobs, config, found.in_chunks),
        evaluated_together=None if found.adds_up and not found.val_draws else _evaluated_together(config),
        alone_raises=found.alone_raises,
        pass_seconds=found.seconds if is_local else None,
        blocks_differ_again=found.differs_again,
        contents=contents,
        own_run=found.own_run and found.own_run.with_steps_of(config.optimizer.reference_batch_size),
    )
    _check_blocks(config, facts)
    _check_single_samples(config, facts)
    _check_grid(config, facts)
    _check_device_hours(config, facts)
    if is_local:
        check_machine(config.named_knobs, "cuda" if _has_cuda() else "cpu")
    if found.outcome == "slow":
        say(
            f"{what} takes more than {SECONDS_OF_A_PASS:g} s on this machine, so nothing is known of it before the first trial"
        )
    else:
        _act_on(found, what, say, is_local=is_local)
    if facts.evaluated_together is not None:
        say(
            f"every trial is evaluated over {counted(facts.evaluated_together, 'sample')} at a time, whatever its micro-batch, so that all are judged by "
            "one loss; to evaluate over as many as your own training does, give the batch that you train with, as batch: {micro_batch_size: ..., "
            "effective_batch_size: ...}"
        )
    return facts


def _evaluated_together(config: StudyConfig) -> int:
    """Return how many samples to evaluate at a time where the loss of a sample, or what is drawn for it, depends on those beside it: the
    micro-batch that the study file gives, or else the smallest that a trial may have, since any trial has the memory for that. Of one alone some losses are always 0."""
    if config.batch.micro_batch_size is not None:
        return config.batch.micro_batch_size
    return max(2, min(_sizes_asked_for(config)[1:], default=1))


def _first_pass(config: StudyConfig, say: Callable[[str], object]) -> FirstPass:
    """Take the first pass; name each part that does not come to its end."""
    from batchscout.trainers.before.first_pass import first_pass

    with contextlib.ExitStack() as waiting:

        def begins(part: Part) -> None:
            waiting.close()
            waiting.enter_context(_told_if_slow(_named(part, config), say, MANY_SECONDS))

        return first_pass(base_trial(config, None), SECONDS_OF_A_PASS, begins)


def _named(part: Part, config: StudyConfig) -> str:
    """Return, in the user's words, what a part of the first pass runs."""
    named = {"data": _data_of, "model": _model_of, "loss": _loss_of}
    return named[part](config) if part != "pass" else "the model's first forward and backward pass"


def _has_ended_its_process(found: FirstPass) -> bool:
    """True if it crashed, exited, or was killed because there was no room."""
    return found.outcome == "ended" or (found.outcome == "too_large" and found.exit_code != 0)


def _act_on(found: FirstPass, what: str, say: Callable[[str], object], *, is_local: bool) -> None:
    """Raise ValueError for a pass that showed a fault; say what is none. what: the part that it came to, in words."""
    match found.outcome:
        case "raised" | "ended" if is_local:
            raise ValueError(f"{what} {_how_it_failed(found)}")
        case "raised" | "ended":
            say(f"{what} {_how_it_failed(found)}; that was on this machine, and the cluster's devices may do better")
        case "too_large":
            say(
                "this machine has no room for a forward and backward pass, so nothing is known of it before the first trial"
            )
        case _ if found.said:
            say(found.said)


def _how_it_failed(found: FirstPass) -> str:
    if found.outcome == "raised":
        given = f"; {found.given}" if found.given else ""
        return f"raised {found.said}{given}; {_DEBUG}"
    if found.outcome == "too_large":
        return (
            "took more memory than this machine lets it have, and was killed; make it smaller, or use a larger machine"
        )
    ended = f"ended its process, which {ending_text(found.exit_code)}; {_DEBUG}"
    return f"{ended}. Its last output:\n{shortened(found.said, MOST_OF_AN_ENDING)}" if found.said else ended


def _data_of(config: StudyConfig) -> str:
    return f"data.target '{config.data.target}' with data.kwargs {config.data.kwargs}"


def _model_of(config: StudyConfig) -> str:
    return f"model.target '{config.model.target}' with model.kwargs {config.model.kwargs}"


def _loss_of(config: StudyConfig) -> str:
    return f"loss '{import_path(config.loss)}'"


def contents_of(config: StudyConfig, say: Callable[[str], object]) -> dict[str, str]:
    """Load the data and build the model; return their digests. Raises ValueError where they do not come. say: as of `check`."""
    from batchscout.trainers.before.digests import digest_of_model, digests_of_data
    from batchscout.trainers.data.samples import load_data

    what = _data_of(config)
    with _in_the_users_words(what), _told_if_slow(what, say, MANY_SECONDS):
        train_set, val_set = load_data(config.data)
        contents = digests_of_data(train_set, val_set)
    what = _model_of(config)
    with _in_the_users_words(what), _told_if_slow(what, say, MANY_SECONDS):
        return contents | digest_of_model(_built(config, train_set))


def _steady_contents(here: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
    """Return what data and model are known by; tell of data that are others in every process. there: as another one has found them."""
    from batchscout.trainers.before.digests import DATA, steady

    found = steady(here, there)
    for name in (name for name in DATA if name not in found):
        give_notice(
            NoticeKind.UNSTEADY_DATA,
            f"the {name} differ in every process that loads them, so trials may train and be judged on different samples, and a later "
            "change of them is not seen: give a seed to what splits, shuffles or draws them",
        )
    return found


def with_predicted_memory(config: StudyConfig, facts: Facts, say: Callable[[str], object] = lambda _: None) -> Facts:
    """Return the facts with the peak memory of the frontier's modes, which fake tensors predict in a process of its
    own.

    say: what tells people of modes that fake tensors cannot follow. Modes that model or data refuse are left out: their probes
    will tell.
    """
    stage = config.keys_of(Frontier)
    if stage is None:
        return facts
    from batchscout.trainers.before.prediction import NotPredictable, predict_in_own_process

    context = StageContext(stage, config, Study(config.name, facts=facts))
    trials = {
        prediction_key(mode): context.short_trial(context.split(2, 2), mode, steps=1)
        for mode in predicted_modes(context)
    }
    peaks = predict_in_own_process(list(trials.values()))
    known = {key: peak for key, peak in zip(trials, peaks, strict=True) if isinstance(peak, PeakMemory)}
    unknown = {key: found.why for key, found in zip(trials, peaks, strict=True) if isinstance(found, NotPredictable)}
    if not unknown:
        check_fits(config, known.values(), smallest_size(context))
    for text in unpredicted_texts(unknown, len(trials)):
        say(text)
    return replace(facts, predicted_memory=known, unpredicted_memory=unknown or None)


@contextlib.contextmanager
def _in_the_users_words(what: str) -> Iterator[None]:
    """Turn whatever the user's target raises into one ValueError that says where, but not a Ctrl-C."""
    try:
        yield
    except (ValueError, StorageLost):
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and interrupt_has_come():
            raise
        file, line = users_frame(error)
        raised = f"raised {shortened(raised_text(error), MOST_OF_AN_ERROR)}"
        did = exit_text(error) if isinstance(error, SystemExit) else raised
        raise ValueError(f"{what} {did} (in {file}, line {line}); {_DEBUG}") from error


@contextlib.contextmanager
def _told_if_slow(what: str, say: Callable[[str], object], seconds: float) -> Iterator[None]:
    """Say once what has not returned: it may take its time, wait for something, or hang."""
    timer = threading.Timer(seconds, say, [f"{what} has not returned for {seconds:g} s; Ctrl-C stops it"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_trial(config: StudyConfig, trial: TrialConfig) -> Counted:
    """Check a single run in this process; errors of the user's own code are raised as they are, for their debugger."""
    from batchscout.trainers.data.samples import first_of, load_data
    from batchscout.trainers.data.targets import counted_in
    from batchscout.trainers.model.models import build_model

    check_compiler(bool(trial.compile))
    if trial.world_size != 1:
        raise ValueError(
            f"batchscout trial runs one rank in this process, and world_size is {trial.world_size}; "
            "add --set world_size=1, or use batchscout run"
        )
    check_machine(trial.memory_knobs, "cuda" if _has_cuda() else "cpu")
    train_set, _ = load_data(trial.data)
    check_batch(trial.effective_batch_size, train_set)
    _check_stream(config, train_set)
    _longest_sample(config, train_set)
    build_model(trial.model, train_set)
    return counted_in(first_of(train_set, 1), None)


def check_compiler(compiles: bool) -> None:
    """Raise ValueError if a compiler is needed and missing: on a CPU torch.compile writes C++, on a GPU Triton builds what calls its
    kernels in C."""
    if not compiles:
        return
    if _has_cuda():
        return _check_tritons_compiler()
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ValueError(
            f"torch.compile needs a C++ compiler on a CPU, and there is no '{compiler}'; install one "
            "(apt-get install g++, or dnf install gcc-c++), name yours in CXX, or set compile: false, and compile: [false] in the frontier stage and in a grid that lists it"
        )


def _check_tritons_compiler() -> None:
    own = os.environ.get("CC")
    if not any(map(shutil.which, [own] if own else ["gcc", "clang"])):
        raise ValueError(
            f"torch.compile needs a C compiler on a GPU, and there is no {repr(own) if own else 'gcc or clang'}; install one "
            "(apt-get install gcc, or dnf install gcc), name yours in CC, or set compile: false, and compile: [false] in the "
            "frontier stage and in a grid that lists it"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise ValueError(
            f"torch.compile needs Python's C header on a GPU, and there is no {quoted(header)}; install it (apt-get install "
            "python3-dev, or dnf install python3-devel), or set compile: false, and compile: [false] in the frontier stage and in a grid that lists it"
        )


def check_size(config: StudyConfig, train_set: Samples) -> None:
    """Raise ValueError if the data is smaller than the study's smallest step, which must not see a sample twice."""
    effective = given_batch(config.batch, config.world_size).effective_batch_size
    if frontier := config.keys_of(Frontier):
        effective = frontier.smallest * config.world_size
    if (equivalence := config.keys_of(Equivalence)) and equivalence.effective_batch_size:
        effective = max(effective, equivalence.effective_batch_size)
    check_batch(effective, train_set)


def check_batch(effective: int, train_set: Samples) -> None:
    """Raise ValueError if the data is smaller than a step. Of a stream so much is read."""
    from batchscout.trainers.data.samples import first_of

    num_train_samples = len(first_of(train_set, effective))
    if num_train_samples < effective:
        raise ValueError(
            f"the training data has {num_train_samples} samples, fewer than one effective batch ({effective}); "
            "add data, shorten seq_len, or lower the batch"
        )


def _check_stream(config: StudyConfig, train_set: Samples) -> None:
    """Raise ValueError where the longest samples of a stream would have to be known."""
    from batchscout.trainers.data.streams import Stream, sizes_of_first

    if not isinstance(train_set, Stream):
        return
    if config.micro_batch is not None:
        raise ValueError(
            f"micro_batch cuts a step by the tokens of its samples, and {train_set.where} is a stream, which has no `lengths`; leave micro_batch "
            "out, or return a map-style data set with `lengths`"
        )
    if config.keys_of(Frontier) is None:
        return
    sizes = sizes_of_first(train_set)
    if len(sizes) > 1:
        raise ValueError(
            f"{train_set.where} has samples of {min(sizes):,} and of {max(sizes):,} numbers among its first, and the frontier must measure the "
            "longest, which a stream has no `lengths` to find; pad or pack them to one length in the stream, or return a map-style data set "
            "with `lengths`"
        )


def _check_blocks(config: StudyConfig, facts: Facts) -> None:
    """Raise ValueError where a model is to be checkpointed that has no repeated blocks, or whose blocks differ when they are run again. The
    frontier leaves such modes out, if it has another one."""
    why = why_not_checkpointed(facts)
    if why is None:
        return
    grid, frontier = config.keys_of(Grid), config.keys_of(Frontier)
    asked = {
        "activation_checkpointing": (config.activation_checkpointing,),
        "stages.grid.activation_checkpointing": grid.activation_checkpointing if grid else (),
        "stages.frontier.activation_checkpointing": frontier.activation_checkpointing if frontier else (),
    }
    if "none" in asked["stages.frontier.activation_checkpointing"]:
        del asked["stages.frontier.activation_checkpointing"]
    for key, modes in asked.items():
        checkpointed = [str(mode) for mode in modes if mode != "none"]
        if checkpointed:
            raise ValueError(f"{key} is {', '.join(checkpointed)}, and {why.reason}; {why.remedy}, or use none")


def _check_single_samples(config: StudyConfig, facts: Facts) -> None:
    """Raise ValueError where single samples are to be trained on, of a model that takes none. The frontier begins at two then."""
    grid, equivalence = config.keys_of(Grid), config.keys_of(Equivalence)
    asked = {
        "batch.micro_batch_size": () if config.keys_of(Frontier) or grid else (_given_size(config),),
        "stages.grid.micro_batch_size": grid.micro_batch_size if grid else (),
        "stages.equivalence.micro_batch_sizes": equivalence.micro_batch_sizes if equivalence else (),
    }
    for key, sizes in asked.items():
        if any(size < facts.smallest_micro_batch for size in sizes):
            raise ValueError(
                f"{key} is {', '.join(map(str, sizes))}, and of a micro-batch of 1 sample the model's training raises {facts.alone_raises}; "
                f"give {key} 2 or more"
            )


def _check_grid(config: StudyConfig, facts: Facts) -> None:
    """Raise ValueError where no combination of a grid can be run."""
    grid = config.keys_of(Grid)
    if grid is None or config.keys_of(Frontier):  # which may choose the micro-batch
        return
    context = StageContext(grid, config, Study(config.name, facts=facts))
    if not propose(context):
        raise ValueError(f"stages.grid has no combination that can be run: {skipped(context)[0]}; change its lists")


FASTER_AT_MOST = 30.0
"""How many times faster a run may be than the one pass that was timed, eager and beside other work."""


def _check_device_hours(config: StudyConfig, facts: Facts) -> None:
    """Raise ValueError where what the study may cost is not enough for one run."""
    if config.budget is None or facts.pass_seconds is None:
        return
    seconds = config.sample_budget / samples_per_second(config, facts.pass_seconds)
    hours = seconds * config.world_size / 3600
    if config.budget.device_hours < hours / FASTER_AT_MOST:
        raise ValueError(
            f"budget.device_hours is {config.budget.device_hours:g}, and one run of {config.sample_budget:,} samples alone takes about {hours:.2g}; "
            "raise it, or lower sample_budget"
        )


def _given_size(config: StudyConfig) -> int:
    return given_batch(config.batch, config.world_size).micro_batch_size


def _check_limit(config: StudyConfig, model: nn.Module) -> None:
    """Raise ValueError if a memory limit holds no batch at all: each rank has weights and their gradients, or a share."""
    if config.memory_limit is None:
        return
    held = sum(p.numel() * p.element_size() * (2 if p.requires_grad else 1) for p in model.parameters())
    held //= config.world_size if config.parallel == "fsdp" else 1
    if config.memory_limit < held:
        raise ValueError(
            f"memory_limit is {bytes_text(config.memory_limit)}, and the model's weights and their gradients alone take "
            f"{bytes_text(held)} on each rank; raise memory_limit, or make the model smaller"
        )


def check_environment(config: StudyConfig) -> None:
    """Raise ValueError if a study on this machine alone may not start what it needs, or if its ranks cannot reach each other."""
    refuse(obstacles_here(observed_environment(), config.world_size, on_gpu=_has_cuda()))


def check_host(config: StudyConfig) -> None:
    """Raise ValueError if a study on this machine alone could not run, or if its ranks may take more memory than it has."""
    check_environment(config)
    if (beyond := beyond_host(config)) is not None:
        raise ValueError(f"{beyond}; lower memory_limit, or leave it out, and each rank has an equal share")


def beyond_host(config: StudyConfig) -> str | None:
    """Return what `beyond_memory` says of the ranks of a study; None on a GPU, whose memory is its own."""
    num_ranks = (config.placement.lanes or 1) * config.world_size
    return None if _has_cuda() else beyond_memory(config.memory_limit, num_ranks, host_bytes(), cgroup.limit_bytes())


def check_ranks(config: StudyConfig) -> None:
    """Raise ValueError if this machine alone has too few GPUs or CPUs for the ranks of one lane, or of as many as the study asks
    for. Ray, which `run` asks, counts the same once it has started."""
    import torch

    lanes, has_gpus = config.placement.lanes or 1, _has_cuda()
    ranks = lanes * config.world_size
    needed = ranks if has_gpus else ranks * (config.placement.cpus_per_rank or 1)
    there, what = (torch.cuda.device_count(), "GPU") if has_gpus else (cgroup.usable_cpus(), "CPU")
    if needed > there:
        raise ValueError(
            f"world_size {config.world_size} on {counted(lanes, 'lane')} takes {counted(needed, what)}, and this machine has {there}; lower "
            "world_size, placement.lanes or placement.cpus_per_rank, or run on a cluster (--address)"
        )


def available_memory_bytes() -> int:
    """Return the memory that a study may take of this host: nine tenths of what the kernel and this process's control
    group allow.

    The rest is for Ray, whose memory monitor ends processes when the host is nearly full.
    """
    return int(SHARE_OF_HOST * cgroup.available_bytes())


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
