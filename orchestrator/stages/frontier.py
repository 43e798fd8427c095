"""How much fits, and what is fast? Doubling until memory ends, then bisecting, in every mode; tokens/s decides."""

from __future__ import annotations

import itertools
from typing import Any

from orchestrator.config import Frontier
from orchestrator.stages.mode import Mode, mode_of
from orchestrator.stages.setting import Setting
from orchestrator.study import Conclusion, Proposal, Study, Trial, TrialState
from orchestrator.words import bytes_text

# Tokens/s within this share of the best are a tie, and go to the smaller memory.
TIE = 0.02


def modes(stage: Frontier, setting: Setting) -> list[Mode]:
    precisions = stage.precision or (setting.study.precision,)
    return [Mode(*mode) for mode in itertools.product(stage.activation_checkpointing, stage.compile, precisions)]


def propose(stage: Frontier, setting: Setting, study: Study) -> list[Proposal]:
    """In every mode: the probes so far and the next one."""
    return [proposal for mode in modes(stage, setting) for proposal in _probes_of(stage, setting, study, mode)]


def _probes_of(stage: Frontier, setting: Setting, study: Study, mode: Mode) -> list[Proposal]:
    proposals: list[Proposal] = []
    outcomes: dict[int, bool] = {}
    largest = _largest(stage, setting, study)
    while (size := next_size(outcomes, stage.smallest, largest)) is not None:
        proposal = _probe(stage, setting, study, mode, size)
        proposals.append(proposal)
        trial = study.trials.get(proposal.id)
        if trial is None or trial.state not in (TrialState.COMPLETE, TrialState.OUT_OF_MEMORY):
            break
        outcomes[size] = trial.state is TrialState.COMPLETE
    return proposals


def _largest(stage: Frontier, setting: Setting, study: Study) -> int:
    """No larger than the data: a step must not see a sample twice."""
    num_samples = study.facts.get("num_train_samples")
    return min(stage.largest, num_samples // setting.study.world_size) if num_samples else stage.largest


def next_size(outcomes: dict[int, bool], smallest: int, largest: int) -> int | None:
    """The micro-batch size to try next, given which fitted; None when the largest that fits is known."""
    fits = max((size for size, fitted in outcomes.items() if fitted), default=0)
    fails = min((size for size, fitted in outcomes.items() if not fitted), default=None)
    if not outcomes:
        return smallest
    if fails is None:
        return min(2 * fits, largest) if fits < largest else None
    if fails - fits <= 1 or fails == smallest:
        return None
    return (fits + fails) // 2


def _probe(stage: Frontier, setting: Setting, study: Study, mode: Mode, size: int) -> Proposal:
    config = setting.short_trial(
        study,
        size,
        2,  # the gradient that is held while the next micro-batch runs counts too
        stage.steps,
        mode=mode,
        dynamic_micro_batch=True,
        evaluation_samples=size * setting.study.world_size,
    )
    several = f"-{mode.precision}" if len(stage.precision) > 1 else ""
    return Proposal(f"frontier-{mode}{several}-m{size}", "frontier", config)


def conclude(stage: Frontier, setting: Setting, study: Study) -> Conclusion:
    """The fastest mode and size within the limit and its headroom. Raises ValueError where nothing fits."""
    probes = study.of_stage("frontier")
    limit = setting.memory_limit_bytes(study) or _device_bytes(probes)
    allowed = None if limit is None else limit * (1 - setting.study.headroom)
    fitting = [t for t in probes if t.state is TrialState.COMPLETE and (allowed is None or _peak(t) <= allowed)]
    if not fitting:
        return _nothing_fits(stage, setting, probes, limit)
    chosen = fastest(fitting)
    by_size = sorted(fitting, key=lambda t: (t.config.micro_batch_size, _rate(t)), reverse=True)
    edges = tuple(_edge(stage, setting, study, mode) for mode in modes(stage, setting))
    values = _values(chosen, fitting, by_size, limit)
    return Conclusion("frontier", True, _sentence(chosen, by_size[0], limit), values, edges)


def _sentence(chosen: Trial, largest: Trial, limit: int | None) -> str:
    room = f"{bytes_text(_peak(chosen))} of {bytes_text(limit)}" if limit else bytes_text(_peak(chosen))
    found = f"{_describe(chosen)} is fastest inside the limit: {_rate(chosen):,.0f} tokens/s, {room}"
    if largest.id == chosen.id:
        return found
    return f"{found}; the largest that fits, {_describe(largest)}, reaches {_rate(largest):,.0f}"


def _values(chosen: Trial, fitting: list[Trial], by_size: list[Trial], limit: int | None) -> dict[str, Any]:
    """What the later stages build on. fitting: in the order of the study file's modes; by_size: the largest first."""
    peak = _peak(chosen)
    baseline = min(fitting, key=lambda trial: trial.config.micro_batch_size)
    return {
        **_of_mode_and_size(chosen),
        "tokens_per_second": _rate(chosen),
        "peak_memory_bytes": peak,
        "limit_bytes": limit,
        "margin_bytes": None if limit is None else limit - peak,
        "baseline_micro_batch_size": baseline.config.micro_batch_size,
        "baseline_mode": mode_of(baseline.config).values(),
        "largest": _of_mode_and_size(by_size[0]),
        "second_largest": _second_largest(by_size),
        "fitting": sorted({t.config.micro_batch_size for t in by_size if mode_of(t.config) == mode_of(chosen.config)}),
    }


def _of_mode_and_size(trial: Trial) -> dict[str, Any]:
    return mode_of(trial.config).values() | {"micro_batch_size": trial.config.micro_batch_size}


def _device_bytes(probes: list[Trial]) -> int | None:
    """The GPU's memory as its ranks read it; None on a CPU host."""
    found = [trial.metrics["device_memory_bytes"] for trial in probes if "device_memory_bytes" in trial.metrics]
    return int(min(found)) if found else None


def fastest(fitting: list[Trial]) -> Trial:
    """The most tokens/s; within a tie the least memory."""
    best = max(_rate(trial) for trial in fitting)
    return min((t for t in fitting if _rate(t) >= (1 - TIE) * best), key=_peak)


def _nothing_fits(stage: Frontier, setting: Setting, probes: list[Trial], limit: int | None) -> Conclusion:
    broken = [trial for trial in probes if trial.state in (TrialState.FAILED, TrialState.PRUNED)]
    if broken:
        return Conclusion("frontier", False, f"no probe succeeded; {broken[0].id}: {broken[0].reason}")
    needed = min((_peak(t) for t in probes if t.state is TrialState.COMPLETE), default=None)
    above = (
        f"; the least measured was {bytes_text(needed)}, and headroom ({setting.study.headroom:.0%}) must stay free"
        if needed
        else ""
    )
    where = f"memory_limit ({bytes_text(limit)})" if limit else "the device"
    more = "raise memory_limit, make" if limit else "make"
    return Conclusion(
        "frontier",
        False,
        f"not even micro-batch {stage.smallest} fits into {where} in any mode{above}; {more} the model smaller, or add "
        "activation_checkpointing modes to the frontier stage",
        {"bad_input": True},
    )


def _second_largest(by_size: list[Trial]) -> dict[str, object] | None:
    """The next micro-batch size below the largest, in any mode."""
    top = by_size[0].config.micro_batch_size
    smaller = [trial for trial in by_size if trial.config.micro_batch_size < top]
    return _of_mode_and_size(smaller[0]) if smaller else None


def _edge(stage: Frontier, setting: Setting, study: Study, mode: Mode) -> str:
    """The evidence for one mode: what fits, and what does not."""
    trials = [study.trials[p.id] for p in _probes_of(stage, setting, study, mode) if p.id in study.trials]
    broken = [t for t in trials if t.state in (TrialState.FAILED, TrialState.PRUNED)]
    if broken:
        return f"{mode}: the search ended at {broken[0].id}, which {broken[0].state}: {broken[0].reason}"
    fits = max((t.config.micro_batch_size for t in trials if t.state is TrialState.COMPLETE), default=0)
    fails = min((t.config.micro_batch_size for t in trials if t.state is TrialState.OUT_OF_MEMORY), default=None)
    end = f"{fails} does not" if fails else f"{_largest(stage, setting, study)} is where the search ends"
    return f"{mode}: micro-batch {fits} fits, {end} ({len(trials)} probes)"


def _describe(trial: Trial) -> str:
    return f"micro-batch {trial.config.micro_batch_size} with activation checkpointing {mode_of(trial.config)}"


def _rate(trial: Trial) -> float:
    return trial.metrics.get("tokens_per_second", 0.0)


def _peak(trial: Trial) -> float:
    return trial.metrics["peak_memory_bytes"]
