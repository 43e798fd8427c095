"""A study as a run of all stages would leave it, made of the journal's own events."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

from pydantic import JsonValue

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.mode import mode_of
from batchscout.orchestrator.config.trial import base_trial, scaled_learning_rate
from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.orchestrator.stages.equivalence import EquivalenceFindings
from batchscout.orchestrator.stages.findings import Findings, concluded
from batchscout.orchestrator.stages.frontier.findings import FrontierFindings, MeasuredPoint, OperatingPoint
from batchscout.orchestrator.stages.frontier.pareto import Point
from batchscout.orchestrator.stages.throughput import ThroughputFindings
from batchscout.orchestrator.stages.train import BatchFindings, LearningRateFindings, TrainFindings
from batchscout.orchestrator.study.causes import Cause
from batchscout.orchestrator.study.events import (
    Concluded,
    Ended,
    Evaluated,
    Event,
    FactsRead,
    RunBegan,
    StageBegan,
    Started,
    parser,
    proposed,
)
from batchscout.orchestrator.study.facts import Facts
from batchscout.orchestrator.study.state import Study
from batchscout.orchestrator.study.trial import Metrics, Proposal, Trial, TrialState

GIB = 2**30
BUDGET = 32_768


STAGES = ("frontier", "throughput", "equivalence", "train", "learning_rate")


def example_config(**changes: Any) -> StudyConfig:
    keys: dict[str, Any] = {
        "name": "wikitext2-gpt",
        "model": {"target": "gpt", "kwargs": {"num_layers": 6}},
        "data": {"target": "python_stdlib"},
        "precision": "bfloat16",
        "memory_limit": "6GiB",
        "sample_budget": BUDGET,
        "stages": [{"type": stage} for stage in STAGES],
    }
    return StudyConfig.model_validate(keys | changes)


def tell(study: Study, event: Event) -> None:
    """Let it happen as the journal does: what JSON cannot hold is not known."""
    study.apply(parser.validate_json(event.model_dump_json()))


def example_study(config: StudyConfig) -> Study:
    """All five stages ended; with an out-of-memory probe, a pruned and a diverged trial."""
    study = Study(config.name)
    tell(study, RunBegan(token="first"))
    tell(study, FactsRead(facts=Facts(memory_limit_bytes=6 * GIB)))
    for add_stage in (_add_frontier, _add_throughput, _add_equivalence, _add_train, _add_learning_rate):
        add_stage(config, study)
    return study


def example_recommendation(**changes: JsonValue) -> Recommendation:
    """What such a study recommends; changes: keys of recommendation.json that say something else."""
    return Recommendation.from_json(json.dumps(RECOMMENDATION | changes))


ANSWER: dict[str, JsonValue] = {
    "settings": "micro-batch 16 x 2 accumulation = effective batch 32, learning rate 0.0006",
    "badge": "undetermined",
    "because": "only one run ended, so nothing was compared",
    "gain": "not known",
    "caveats": ["one seed"],
    "next": "batchscout export RUN_DIR",
}

RECOMMENDATION: dict[str, JsonValue] = {
    "micro_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "world_size": 1,
    "effective_batch_size": 32,
    "activation_checkpointing": "selective",
    "compile": True,
    "precision": "bfloat16",
    "learning_rate": 6e-4,
    "warmup_samples": 328,
    "complete": True,
    "verdict": "Train with micro-batch 16, accumulation 2 and selective activation checkpointing.",
    "answer": ANSWER,
    "decided": False,
    "evidence": {
        "trial": "learning_rate-x1",
        "val_loss": 3.8785,
        "tokens_per_second": 35_300.0,
        "peak_memory_bytes": int(4.1 * GIB),
        "stages": {"equivalence": "rho is at most 1.9e-05, inside the tolerance of 1.0e-04"},
        "notes": ["none: micro-batch 8 fits, 16 does not (5 probes)"],
    },
    "alternatives": [
        {
            "trial": "train-m24k1",
            "role": "second largest",
            "micro_batch_size": 24,
            "gradient_accumulation_steps": 1,
            "learning_rate": 5.2e-4,
            "val_loss": 3.9085,
            "tokens_per_second": None,
        }
    ],
    "ruled_out": [{"trial": "train-m32k1", "state": "pruned", "reason": "rung: place 5 of 6 at 16384"}],
    "sample_budget": BUDGET,
    "optimizer": {
        "type": "adamw",
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
        "max_gradient_norm": 1.0,
    },
    "schedule": {"type": "warmup_stable_decay", "decay": 0.2},
    "seed": 0,
}


def add_trial(
    study: Study, config: StudyConfig, trial_id: str, role: str = "", candidate: str = "", **changes: Any
) -> None:
    """Propose a trial: it waits. The baseline is protected."""
    stage = trial_id.split("-")[0]
    trial = base_trial(config, 6 * GIB).model_copy(update=changes)
    tell(study, StageBegan(stage=stage))
    protected = "baseline" in role
    tell(study, proposed(Proposal(trial_id, stage, trial, candidate or trial_id, role, protected=protected)))


def end_trial(
    study: Study,
    trial_id: str,
    seconds: float,
    metrics: Metrics,
    state: TrialState = TrialState.COMPLETE,
    cause: Cause | None = None,
    reason: str = "",
) -> None:
    tell(study, Started(id=trial_id))
    tell(study, Ended(id=trial_id, state=state, cause=cause, reason=reason, metrics=metrics, seconds=seconds))


def conclude(study: Study, findings: Findings, reason: str, notes: tuple[str, ...] = ()) -> None:
    tell(study, Concluded(**asdict(concluded(findings, reason, notes))))


def _add_frontier(config: StudyConfig, study: Study) -> None:
    for mode, per_sample, speed in (("none", 0.42, 1.0), ("selective", 0.27, 0.93), ("full", 0.09, 0.76)):
        for size in (1, 2, 4, 8, 16, 32, 64):
            trial_id = f"frontier-{mode}-m{size}"
            add_trial(study, config, trial_id, micro_batch_size=size, activation_checkpointing=mode)
            peak = (0.7 + per_sample * size) * GIB
            if peak > 6 * GIB:
                end = (TrialState.OUT_OF_MEMORY, Cause.OUT_OF_MEMORY, f"micro-batch {size} needs more than 6 GiB")
                end_trial(study, trial_id, 21.0, {"compile_seconds": 12.0}, *end)
                break
            rate = 41_000 * speed * size / (size + 2.2)
            measured: Metrics = {
                "tokens_per_second": rate,
                "peak_memory_bytes": peak,
                "step_seconds": 512 * size / rate,
            }
            more: Metrics = {"predicted_memory_bytes": 1.04 * peak, "mfu": rate / 130_000, "train_seconds": 6.0}
            end_trial(study, trial_id, 24.0, measured | more | {"compile_seconds": 14.0})
    reason = "micro-batch 16 with activation checkpointing selective is fastest inside the limit: 33,521 tokens/s"
    notes = ("none: micro-batch 8 fits, 16 does not (5 probes)", "full: micro-batch 32 fits, 64 does not (7 probes)")
    chosen, smallest = (_measured(study.trials[f"frontier-{name}"]) for name in ("selective-m16", "none-m1"))
    findings = FrontierFindings(
        chosen=chosen,
        winner="frontier-selective-m16",
        limit_bytes=6 * GIB,
        baseline=OperatingPoint(smallest.mode, smallest.micro_batch_size),
        largest=_measured(study.trials["frontier-full-m32"]),
        fitting=(1, 2, 4, 8, 16),
        front=tuple(_point(study.trials[f"frontier-{name}"]) for name in ("full-m1", "full-m8", "selective-m16")),
        knee="full-m8",
    )
    conclude(study, findings, reason, notes)


def _measured(trial: Trial) -> MeasuredPoint:
    rate, peak = trial.measured("tokens_per_second"), trial.measured("peak_memory_bytes")
    return MeasuredPoint(mode_of(trial.config), trial.config.micro_batch_size, rate, peak)


def _point(trial: Trial) -> Point:
    measured = _measured(trial)
    return Point(trial.id.removeprefix("frontier-"), measured.tokens_per_second, measured.peak_memory_bytes)


def _add_throughput(config: StudyConfig, study: Study) -> None:
    goodput: dict[int, float] = {}
    for k in (1, 2, 4, 8, 16):
        trial_id = f"throughput-k{k}"
        add_trial(study, config, trial_id, micro_batch_size=16, gradient_accumulation_steps=k)
        rate = 33_500 * (1 + 0.06 * math.log2(k))
        goodput[16 * k] = rate / 33_500 / (1 + 16 * k / 90)
        noise = {} if k == 1 else {"noise_scale": 88.0 + k, "noise_scale_low": 60 - k, "noise_scale_high": 130 + 30 / k}
        signal = {} if k == 1 else {"coherence": 0.31 / (1 + k / 40), "coherence_floor": 0.24 / k}
        times = {"step_seconds": 4096 * k / rate, "train_seconds": 20 * 4096 * k / rate, "compile_seconds": 13.0}
        end_trial(study, trial_id, 40.0 + 3 * k, {"tokens_per_second": rate} | noise | signal | times)
    reason = "the critical batch size is about 90 samples (58 to 138); accumulation past 4 buys nothing"
    findings = ThroughputFindings(
        critical_batch_size=90.0,
        critical_batch_size_low=58.0,
        critical_batch_size_high=138.0,
        goodput=goodput,
    )
    conclude(study, findings, reason)


def _add_equivalence(config: StudyConfig, study: Study) -> None:
    rhos: dict[str, float] = {}
    for size, k, rho in ((16, 2, 0.0), (8, 4, 1.1e-5), (4, 8, 1.9e-5)):
        trial_id = f"equivalence-m{size}k{k}"
        add_trial(study, config, trial_id, micro_batch_size=size, gradient_accumulation_steps=k)
        end_trial(study, trial_id, 19.0, {"rho": rho, "train_seconds": 8.0, "compile_seconds": 9.0})
        rhos[trial_id] = rho
    reason = "every split of the effective batch 32 leads to the same weights: rho is at most 1.9e-05"
    conclude(study, EquivalenceFindings(1e-4, rhos), reason)


def _train(study: Study, trial_id: str, floor: float, rate: float, stop: float = 1.0) -> None:
    """Evaluations on a falling curve, up to a share of the budget."""
    for share in (i / 8 for i in range(1, round(8 * stop) + 1)):
        samples = share * BUDGET
        loss = floor + 1.9 * math.exp(-4.2 * share) + (0.0 if share < 1 else -0.05)
        metrics: Metrics = {"samples_seen": samples, "val_loss": loss, "train_seconds": samples * 256 / rate}
        tell(study, Evaluated(id=trial_id, metrics=metrics, rungs={int(samples): loss}))
    last = study.trials[trial_id]
    ended: Metrics = {
        "perplexity": math.exp(last.measured("val_loss")),
        "tokens_per_second": rate,
        "compile_seconds": 15.0,
        "peak_memory_bytes": 4.1 * GIB,
    }
    seconds = last.measured("train_seconds") + 25.0
    if stop == 1:
        end_trial(study, trial_id, seconds, ended)
    else:
        reason = f"place 5 of 6 at {last.measured('samples_seen'):.0f}; best 3 go on"
        end_trial(study, trial_id, seconds, ended, TrialState.PRUNED, Cause.RUNG, reason)


def _add_train(config: StudyConfig, study: Study) -> None:
    candidates = (
        ("m1k1", "baseline", 1, 1, 1.0, 4.02, 12_800, 1.0),
        ("m32k1", "largest micro-batch", 32, 1, 1.0, 3.96, 29_000, 0.5),
        ("m24k1", "", 24, 1, 1.0, 3.93, 34_400, 1.0),
        ("m16k1", "", 16, 1, 1.0, 3.97, 33_500, 0.25),
        ("m16k2", "most samples/s", 16, 2, 1.0, 3.90, 35_300, 1.0),
        ("m16k2-lr0.000849", "", 16, 2, 1.414, 3.99, 35_300, 0.25),
    )
    for name, role, size, k, multiple, floor, rate, stop in candidates:
        learning_rate = multiple * scaled_learning_rate(config.optimizer, size * k)
        batch = {"micro_batch_size": size, "gradient_accumulation_steps": k, "learning_rate": learning_rate}
        add_trial(study, config, f"train-{name}", role, **batch)
        _train(study, f"train-{name}", floor, rate, stop)
    best = study.trials["train-m16k2"].measured("val_loss")
    batches = (batch_findings(1, 4.0, 0.01), batch_findings(24, 3.92, 0.2), batch_findings(32, best, 0.93))
    findings = TrainFindings("train-m16k2", best, batches=batches, seed_deviation=0.016)
    conclude(study, findings, "train-m16k2 ends at 3.889, 0.12 below the baseline")


def batch_findings(effective_batch_size: int, score: float, p_best: float, **changes: Any) -> BatchFindings:
    """What a train stage could find of a batch, whose best rate lies at 6e-4 times or by a factor of 1.5."""
    found = BatchFindings(
        effective_batch_size, BUDGET, 6e-4, 4e-4, 9e-4, score, score - 0.03, score + 0.03, p_best, num_runs=2
    )
    return replace(found, **changes)


def _add_learning_rate(config: StudyConfig, study: Study) -> None:
    for multiplier, floor in ((0.5, 3.97), (0.71, 3.92), (1, 3.90), (1.41, 3.93)):
        trial_id = f"learning_rate-x{multiplier}"
        batch = {"micro_batch_size": 16, "gradient_accumulation_steps": 2, "learning_rate": 6e-4 * multiplier}
        add_trial(study, config, trial_id, **batch)
        _train(study, trial_id, floor, 35_300)
    add_trial(
        study, config, "learning_rate-x2", micro_batch_size=16, gradient_accumulation_steps=2, learning_rate=1.2e-3
    )
    end = (TrialState.PRUNED, Cause.DIVERGED, "the loss is not finite at step 41")
    end_trial(study, "learning_rate-x2", 31.0, {"val_loss": None}, *end)
    losses = {f"{t.config.learning_rate:.3g}": t.metric("val_loss") for t in study.of_stage("learning_rate")}
    findings = LearningRateFindings(
        learning_rate=6e-4,
        winner="learning_rate-x1",
        on_edge=False,
        losses={rate: loss for rate, loss in losses.items() if loss is not None},
    )
    conclude(study, findings, "the rule's learning rate 6.0e-04 is the best of 5")
