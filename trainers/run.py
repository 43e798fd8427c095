"""Everything that moves in a training run, and one optimizer step of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from batchscout.trainers.checkpoints.checkpoint import random_state, set_random_state
from batchscout.trainers.checkpoints.made_with import made_with
from batchscout.trainers.checkpoints.resume import branch_state, newest_state, of_every_rank
from batchscout.trainers.config import DataConfig, Split, TrialConfig
from batchscout.trainers.data.batches import fetch, move
from batchscout.trainers.data.draws import drawing_on_device_from, seed_of
from batchscout.trainers.data.feed import Ask, Feed
from batchscout.trainers.data.loaders import workers_of
from batchscout.trainers.data.micro_batches import StepPlan, micro_batches_of
from batchscout.trainers.data.order import InOrder, LongestFirst, Order, SampleOrder, longest
from batchscout.trainers.data.samples import SAMPLES_LOOKED_AT, Samples, first_of, load_data, num_samples
from batchscout.trainers.data.streams import Place, Stream
from batchscout.trainers.knobs import check_machine, with_settings
from batchscout.trainers.model.adding_up import SAMPLES_TO_CHECK, evaluated
from batchscout.trainers.model.contract import check_first_loss
from batchscout.trainers.model.equivalence import Weights, weights_of
from batchscout.trainers.model.frozen import frozen_digest
from batchscout.trainers.model.knobs import head_if_wanted
from batchscout.trainers.model.models import initial_module, with_synced_batch_norm
from batchscout.trainers.model.parallel import (
    load_buffers,
    load_state,
    load_trained,
    reshard,
    state_of,
    unsaved_buffers,
)
from batchscout.trainers.noise.gradient_noise import FIRST_STEPS, THEN_ONE_IN
from batchscout.trainers.noise.step_statistics import read_step
from batchscout.trainers.report import Known
from batchscout.trainers.speed.flops import work_of
from batchscout.trainers.speed.meter import Meter, TokenCount
from batchscout.trainers.speed.throughput import NUM_WARMUP_STEPS
from batchscout.trainers.step.accumulation import over_all_ranks
from batchscout.trainers.step.learner import Learner
from batchscout.trainers.step.learning_rate import learning_rate_of_step
from batchscout.trainers.step.optimizers import set_learning_rate
from batchscout.trainers.step_log import Step

# The device is read once per so many steps, and what costs passes over the parameters is looked at in the last of them;
# after the first steps, as with the micro-gradients, of one interval in so many.
STEPS_PER_INTERVAL = 10
PLANS_KEPT = 64
"""Steps whose plans are remembered: a step's is made when its first batch is fetched ahead, and looked at again when it is taken."""


class Run(Learner):
    """A model, its optimizer and their place in the data. `step()` moves them; nothing reads the device until
    `read()`."""

    def __init__(self, config: TrialConfig, device: torch.device, compile_seconds: float = 0.0) -> None:
        """compile_seconds: the seconds already spent on compiling its code."""
        config = with_settings(config)
        check_machine(config.memory_knobs, device.type)
        self.config, self.device = config, device
        self.rank = _rank_of(config.world_size)
        self.meter = Meter(config, device, compile_seconds)
        self._open_data()
        module = initial_module(config, self.train_set)
        self.frozen_digest = frozen_digest(module, config)
        self.work = work_of(config, module, self.first_samples)
        if config.sync_batch_norm and config.world_size > 1:
            module = with_synced_batch_norm(module, device)
        lengths_differ = getattr(self.train_set, "lengths", None) is not None or bool(config.long_samples)
        head_name = head_if_wanted(config, self.first_samples)
        super().__init__(config, module, device, head_name=head_name, lengths_differ=lengths_differ)
        if self.scaler.is_enabled():
            self.nominal_targets = self._targets_of_a_micro_batch()
        # In place each change raises the version, of which torch keeps count.
        self._made_buffers = {name: (one, one._version) for name, one in unsaved_buffers(self.module).items()}
        self.num_steps = self.samples_seen = 0
        self.evaluated_at: list[int] = []
        """The sample counts of the evaluations that were reported and answered."""
        self._unread: list[tuple[int, int, float]] = []  # (number, samples seen, learning rate) of each step
        torch.manual_seed(config.seed * config.world_size + self.rank)  # dropout differs between ranks
        self.meter.clock.start()

    def _open_data(self) -> None:
        """Open both sets, and plan which samples steps take and who fetches them."""
        config = self.config
        self.train_set, self.val_set = open_data(config.data.model_copy(update={"workers": None}).model_dump_json())
        self.first_samples = first_of(self.train_set, max(SAMPLES_LOOKED_AT, config.evaluation_samples))
        self.order = order_of(config, self.train_set)
        plans = micro_batches_of(config, self.train_set, self.order, self.rank)
        self.plan_of_step = functools.lru_cache(PLANS_KEPT)(plans.of_step)
        workers = workers_of(config.data.workers, self.train_set)
        self.feed = Feed(self.train_set, self._asked_from, workers, self.device, config.seed)

    def _targets_of_a_micro_batch(self) -> float:
        """Return about how many there are, which the model alone can tell: a sample may have one, or one for each of its pixels."""
        size = self.config.micro_batch_size
        count = min(size, SAMPLES_TO_CHECK, len(self.first_samples))
        batch = move(fetch(self.first_samples, range(count)), self.device)
        _, num_targets = evaluated(self.module, self.loss_function, batch)
        reshard(self.module)
        return max(1.0, num_targets * size / count)

    def step(self) -> None:
        """One optimizer update from one effective batch."""
        config, split, first_sample = self.config, self._next_split(), self.samples_seen
        self.num_steps += 1
        self.samples_seen += split.effective_batch_size
        self.meter.begin_step(split.num_micro_batches)
        plan = self.plan_of_step(first_sample, split)
        self._begin_norms(plan)
        learning_rate = learning_rate_of_step(config, first_sample)
        set_learning_rate(self.optimizer, learning_rate)
        sums = self.accumulate(self._micro_batches(first_sample, plan), len(plan.micro_batches))
        loss_sum, num_targets = over_all_ranks(*sums)
        factor = self.nominal_targets * config.world_size / num_targets
        with self._drawn_alike():
            gradient_norm = self.update(factor, split.effective_batch_size)
        self.meter.end_of_step(loss_sum, num_targets, gradient_norm, self.norms.take() if self.norms else None)
        if plan.tokens is not None:
            self.meter.tokens.add(plan.tokens)
        self._unread.append((self.num_steps, self.samples_seen, learning_rate))

    def _drawn_alike(self) -> contextlib.AbstractContextManager[None]:
        """Let the optimizer draw the same on every rank that holds the whole model: weights are never exchanged, so what each rounds or
        adds at random by itself would drive them apart, step by step. Shards are no copies of each other."""
        if self.config.world_size == 1 or self.config.parallel == "fsdp":
            return contextlib.nullcontext()
        return drawing_on_device_from(seed_of(self.config.seed, self.num_steps), self.device)

    def time_steps(self, num_steps: int) -> None:
        """Take so many steps without statistics, so that the speed told from here on is theirs. The count of steps and
        samples stays as it is: they are no part of the run."""
        place, tokens = (self.num_steps, self.samples_seen), self.meter.tokens
        self.meter.begin_pace()
        self.meter.tokens = TokenCount()
        norms, self.norms = self.norms, None
        if norms is not None:
            norms.rest()
        for number in range(1, num_steps + 1):
            self.step()
            if number % STEPS_PER_INTERVAL == 0 or number == num_steps:
                self.read()
        self.norms, (self.num_steps, self.samples_seen), self.meter.tokens = norms, place, tokens

    def _begin_norms(self, plan: StepPlan) -> None:
        """Look at the micro-gradients of some steps; of none where micro-batches are cut by tokens. Each then has samples of about one
        length, so what differs between short and long samples would be taken for noise of the micro-batches, many times too large.
        Snapshots of the noise draw micro-batches of their own."""
        if self.norms is None:
            return
        if plan.tokens is not None:
            return self.norms.rest()
        ends_interval = self.num_steps % STEPS_PER_INTERVAL == 0
        self.norms.begin_step(self.num_steps, follow_sum=ends_interval and self._looks_closely())

    def _micro_batches(self, first_sample: int, plan: StepPlan) -> Iterator[Any]:
        for turn in range(len(plan.micro_batches)):
            with self.meter.clock.waiting():
                batch = self.feed.batch(first_sample, turn)
            yield batch

    def _asked_from(self, first_sample: int) -> Iterator[Ask]:
        """Yield what this rank takes from the step on that begins at this sample: up to the budget, or without an end where the step lies
        behind it."""
        begin, budget = first_sample, self.config.sample_budget
        while first_sample < budget or begin >= budget:
            split = self.config.split_in(self.config.phase_at(first_sample))
            next_step = first_sample + split.effective_batch_size
            micro_batches = self.plan_of_step(first_sample, split).micro_batches
            for turn, indices in enumerate(micro_batches):
                seed = seed_of(self.config.seed, first_sample, turn, self.rank)
                yield Ask(indices, first_sample, next_step, turn, turn == len(micro_batches) - 1, seed)
            first_sample = next_step

    def _next_split(self) -> Split:
        return self.config.split_in(self.config.phase_at(self.samples_seen))

    def ends_phase(self) -> bool:
        """True if the next step has more or fewer micro-batches than the one just taken."""
        return bool(self.config.ramp) and self._next_split().num_micro_batches != self.meter.num_micro_batches

    def read(self) -> list[Step]:
        """Bring the steps since the last read to the host, and return them. The last gradient is let go."""
        unread, self._unread = self._unread, []
        steps = [
            Step(number, samples_seen, loss, norm, learning_rate, data_wait)
            for (number, samples_seen, learning_rate), (loss, norm, data_wait) in zip(
                unread, self.meter.read(), strict=True
            )
        ]
        if steps and steps[0].number == 1:
            check_first_loss(steps[0].loss)
        if self.norms is not None and self._looks_closely():
            self.meter.observe(read_step(self.optimizer) | self.norms.read_cosine())
        self.optimizer.zero_grad(set_to_none=True)
        return steps

    def _looks_closely(self) -> bool:
        """True if this interval also measures what costs passes over the parameters."""
        return self.num_steps <= FIRST_STEPS or math.ceil(self.num_steps / STEPS_PER_INTERVAL) % THEN_ONE_IN == 0

    def metrics(self) -> dict[str, float]:
        """Return all figures, as `Meter.metrics` does."""
        place = {"samples_seen": self.samples_seen, "learning_rate": float(self.optimizer.param_groups[0]["lr"])}
        if self.scaler.is_enabled():
            place["loss_scale"] = self.scaler.get_scale()
        if isinstance(self.train_set, Stream):
            place["stream_passes"] = self.feed.passes
        place["data_workers"] = self.feed.workers.number
        return place | self.meter.metrics(self.module, num_samples(self.train_set), self.work)

    def close(self) -> None:
        """End the processes that fetch its data."""
        self.feed.close()

    def state(self, report: dict[str, Any] | None) -> dict[str, Any]:
        """Return all that a bitwise continuation needs, and the report that is about to be made. Every rank calls
        this."""
        return {
            "report": report,
            "num_steps": self.num_steps,
            "samples_seen": self.samples_seen,
            **self.meter.state(),
            "evaluated_at": list(self.evaluated_at),
            **self._made_with(),
            "seed": self.config.seed,
            **state_of(self.module, self.optimizer),
            "buffers": {name: buffer.detach().cpu() for name, buffer in self._moved_buffers()},
            "scaler": self.scaler.state_dict(),
            "average": self.average.state() if self.average else None,
            "random": of_every_rank(random_state(self.device)),
            **({"stream": dataclasses.asdict(self.feed.place)} if self.feed.place else {}),
        }

    def _moved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that the module's own state leaves out and that are not as it was made with."""
        for name, buffer in unsaved_buffers(self.module).items():
            made, version = self._made_buffers.get(name, (None, 0))
            if buffer is not made or buffer._version != version:
                yield name, buffer

    def resume(self, directory: Path, token: str = "local", known: Known | None = None) -> dict[str, Any] | None:
        """Go on from the run's newest checkpoint below `directory`; where there is none, a branch begins from another
        run's. token, known: see `batchscout.trainers.loop.train`.

        Returns the report that was saved with the checkpoint, if there is one that this run has to make.
        """
        state = newest_state(directory, self._made_with(), self.rank, token, known)
        if state is None:
            if self.config.branch_from is not None:
                self._load(branch_state(self.config.branch_from, self.config, directory))
            return None
        self._load(state)
        self.evaluated_at = list(state["evaluated_at"])
        self.meter.load(state)  # but not at a branch: its figures are its own
        return state["report"]

    def _made_with(self) -> dict[str, Any]:
        return made_with(self.config, self.train_set, self.val_set, self.frozen_digest)

    def _load(self, state: dict[str, Any]) -> None:
        """Take weights, moments, averages and the place in the data from a checkpoint; the settings stay this run's. An optimizer of
        the user's own may keep more in its groups than settings, so they are the checkpoint's."""
        kept = () if self.config.optimizer.type == "own" else self.optimizer.param_groups
        settings = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in kept]
        self.num_steps, self.samples_seen = state["num_steps"], state["samples_seen"]
        if state.get("stream"):
            self.feed.go_on_from(Place(**state["stream"]))
        load_state(self.module, self.optimizer, state)
        with torch.no_grad():
            load_buffers(self.module, state.get("buffers", {}))  # earlier checkpoints have none
        for group, own in zip(self.optimizer.param_groups, settings, strict=False):
            group.update(own)
        if state["scaler"]:  # that of another precision has none
            self.scaler.load_state_dict(state["scaler"])
        if self.average is not None and state["average"] is not None:
            self.average.load(state["average"])
        if self.rank < len(state["random"]) and state["seed"] == self.config.seed:
            set_random_state(state["random"][self.rank], self.device)

    def initial_weights(self, directory: Path) -> Weights:
        """Return the weights this run began with: made again from its seed, or those of its branch point. directory: the
        run's own."""
        module, point = initial_module(self.config, self.train_set), self.config.branch_from
        if point is not None:
            load_trained(module, branch_state(point, self.config, directory)["model"])
        return weights_of(module)


def _rank_of(world_size: int) -> int:
    """Return which rank this process is. Raises ValueError where the trial is one of another number of ranks."""
    there = dist.get_world_size() if dist.is_initialized() else 1
    if there != world_size:
        raise ValueError(
            f"world_size is {world_size}, but this trial runs in {there} process{'es' * (there != 1)}; start {world_size} ranks or set world_size: {there}"
        )
    return dist.get_rank() if dist.is_initialized() else 0


def order_of(config: TrialConfig, train_set: Samples) -> Order:
    """Return which samples steps take. A stream does not tell lengths, so it has none that are the longest."""
    if isinstance(train_set, Stream):
        return InOrder()
    order = SampleOrder(len(train_set), config.seed)
    if not config.longest_samples:
        return order
    indices = longest(train_set, config.effective_batch_size, config.long_samples)
    return LongestFirst(indices, NUM_WARMUP_STEPS * config.effective_batch_size, order)


@functools.lru_cache(maxsize=1)
def open_data(config: str) -> tuple[Samples, Samples]:
    """Open the data, and keep it open for the next trial: to find and check the files is most of what a short trial
    costs."""
    return load_data(DataConfig.model_validate_json(config))
