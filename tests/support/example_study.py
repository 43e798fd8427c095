"""A study as a run of all stages would leave it, made of the journal's own records."""

from __future__ import annotations

import math
from typing import Any

from orchestrator.config.keys import StudyConfig
from orchestrator.config.trial import base_trial, scaled_learning_rate
from orchestrator.study.state import Study

GIB = 2**30
BUDGET = 32_768


def example_config(**changes: Any) -> StudyConfig:
    keys: dict[str, Any] = {
        "name": "wikitext2-gpt",
        "model": {"target": "gpt", "kwargs": {"num_layers": 6}},
        "data": {"target": "python_stdlib"},
        "precision": "bfloat16",
        "memory_limit": "6GiB",
        "sample_budget": BUDGET,
    }
    return StudyConfig.model_validate(keys | changes)


def example_study(config: StudyConfig) -> Study:
    """All five stages ended; with an out-of-memory probe, a pruned and a diverged trial."""
    study = Study(config.name)
    study.apply({"kind": "run"})
    study.apply({"kind": "facts", "facts": {"memory_limit_bytes": 6 * GIB}})
    for add_stage in (_add_frontier, _add_throughput, _add_equivalence, _add_train, _add_learning_rate):
        add_stage(config, study)
    return study


def example_recommendation() -> dict[str, Any]:
    return {
        "micro_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "world_size": 1,
        "effective_batch_size": 32,
        "activation_checkpointing": "selective",
        "compile": True,
        "precision": "bfloat16",
        "learning_rate": 6e-4,
        "warmup_samples": 328,
        "verdict": "Train with micro-batch 16, accumulation 2 and selective activation checkpointing.",
        "evidence": {
            "trial": "learning_rate-x1",
            "val_loss": 3.8785,
            "tokens_per_second": 35_300.0,
            "peak_memory_bytes": int(4.1 * GIB),
            "stages": {"equivalence": "rho is at most 1.9e-05, inside the tolerance of 1.0e-04"},
            "notes": ["none: micro-batch 8 fits, 16 does not (5 probes)"],
        },
        "alternatives": [{"trial": "train-m24k1", "role": "second largest", "val_loss": 3.9085, "seed": None}],
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


def add_trial(study: Study, config: StudyConfig, trial_id: str, role: str = "", **changes: Any) -> None:
    """A trial that waits."""
    trial = base_trial(config, 6 * GIB).model_copy(update=changes).model_dump(mode="json")
    stage = trial_id.split("-")[0]
    record = {
        "id": trial_id,
        "stage": stage,
        "role": role,
        "protected": False,
        "fresh": False,
        "expected": {},
        "config": trial,
    }
    study.apply({"kind": "stage", "stage": stage})
    study.apply({"kind": "trial", **record})


def end_trial(
    study: Study, trial_id: str, seconds: float, metrics: dict[str, Any], state: str = "complete", reason: str = ""
) -> None:
    end = {"state": state, "reason": reason, "metrics": metrics, "seconds": seconds}
    study.apply({"kind": "started", "id": trial_id})
    study.apply({"kind": "ended", "id": trial_id, **end})


def conclude(study: Study, stage: str, reason: str, values: dict[str, Any], notes: tuple[str, ...] = ()) -> None:
    study.apply({"kind": "conclusion", "stage": stage, "ok": True, "reason": reason, "values": values, "notes": notes})


def _add_frontier(config: StudyConfig, study: Study) -> None:
    for mode, per_sample, speed in (("none", 0.42, 1.0), ("selective", 0.27, 0.93), ("full", 0.09, 0.76)):
        for size in (1, 2, 4, 8, 16, 32, 64):
            trial_id = f"frontier-{mode}-m{size}"
            add_trial(study, config, trial_id, micro_batch_size=size, activation_checkpointing=mode)
            peak = (0.7 + per_sample * size) * GIB
            if peak > 6 * GIB:
                text = f"out_of_memory: micro-batch {size} needs more than 6 GiB"
                end_trial(study, trial_id, 21.0, {"compile_seconds": 12.0}, "out_of_memory", text)
                break
            rate = 41_000 * speed * size / (size + 2.2)
            measured = {"tokens_per_second": rate, "peak_memory_bytes": peak, "step_seconds": 512 * size / rate}
            more = {"predicted_memory_bytes": 1.04 * peak, "mfu": rate / 130_000, "train_seconds": 6.0}
            end_trial(study, trial_id, 24.0, measured | more | {"compile_seconds": 14.0})
    values = {"micro_batch_size": 16, "activation_checkpointing": "selective", "compile": True, "precision": "bfloat16"}
    reason = "micro-batch 16 with activation checkpointing selective is fastest inside the limit: 33,521 tokens/s"
    notes = ("none: micro-batch 8 fits, 16 does not (5 probes)", "full: micro-batch 32 fits, 64 does not (7 probes)")
    front = [
        (f"{t.config.activation_checkpointing}-m{t.config.micro_batch_size}", t.metrics) for t in study.trials.values()
    ]
    points = [{"name": name, **metrics} for name, metrics in front if name in ("full-m1", "full-m8", "selective-m16")]
    values |= {"winner": "frontier-selective-m16", "front": points, "knee": "full-m8"}
    conclude(study, "frontier", reason, values | {"limit_bytes": 6 * GIB}, notes)


def _add_throughput(config: StudyConfig, study: Study) -> None:
    goodput = {}
    for k in (1, 2, 4, 8, 16):
        trial_id = f"throughput-k{k}"
        add_trial(study, config, trial_id, micro_batch_size=16, gradient_accumulation_steps=k)
        rate = 33_500 * (1 + 0.06 * math.log2(k))
        goodput[str(16 * k)] = rate / 33_500 / (1 + 16 * k / 90)
        noise = {} if k == 1 else {"noise_scale": 88.0 + k, "noise_scale_low": 60 - k, "noise_scale_high": 130 + 30 / k}
        signal = {} if k == 1 else {"coherence": 0.31 / (1 + k / 40), "coherence_floor": 0.24 / k}
        times = {"step_seconds": 4096 * k / rate, "train_seconds": 20 * 4096 * k / rate, "compile_seconds": 13.0}
        end_trial(study, trial_id, 40.0 + 3 * k, {"tokens_per_second": rate} | noise | signal | times)
    reason = "the critical batch size is about 90 samples (58 to 138); accumulation past 4 buys nothing"
    values = {"critical_batch_size": 90.0, "critical_batch_size_low": 58.0, "critical_batch_size_high": 138.0}
    conclude(study, "throughput", reason, values | {"goodput": goodput, "best_goodput": 32})


def _add_equivalence(config: StudyConfig, study: Study) -> None:
    for size, k, rho in ((16, 2, 0.0), (8, 4, 1.1e-5), (4, 8, 1.9e-5)):
        trial_id = f"equivalence-m{size}k{k}"
        add_trial(study, config, trial_id, micro_batch_size=size, gradient_accumulation_steps=k)
        end_trial(study, trial_id, 19.0, {"rho": rho, "train_seconds": 8.0, "compile_seconds": 9.0})
    reason = "every split of the effective batch 32 leads to the same weights: rho is at most 1.9e-05"
    conclude(study, "equivalence", reason, {"tolerance": 1e-4})


def _train(config: StudyConfig, study: Study, trial_id: str, floor: float, rate: float, stop: float = 1.0) -> None:
    """Evaluations on a falling curve, up to a share of the budget."""
    for share in (i / 8 for i in range(1, round(8 * stop) + 1)):
        samples = share * BUDGET
        loss = floor + 1.9 * math.exp(-4.2 * share) + (0.0 if share < 1 else -0.05)
        metrics = {"samples_seen": samples, "val_loss": loss, "train_seconds": samples * 256 / rate}
        rungs = {str(int(samples)): loss}
        study.apply({"kind": "result", "id": trial_id, "metrics": metrics, "rungs": rungs})
    last = study.trials[trial_id].metrics
    ended = {"perplexity": math.exp(last["val_loss"]), "tokens_per_second": rate, "compile_seconds": 15.0}
    reason = f"rung: place 5 of 6 at {last['samples_seen']:.0f}; best 3 go on"
    end = ("complete", "") if stop == 1 else ("pruned", reason)
    end_trial(study, trial_id, last["train_seconds"] + 25.0, ended | {"peak_memory_bytes": 4.1 * GIB}, *end)


def _add_train(config: StudyConfig, study: Study) -> None:
    candidates = (
        ("m1k1", "baseline", 1, 1, 4.02, 12_800, 1.0),
        ("m32k1", "largest feasible", 32, 1, 3.96, 29_000, 0.5),
        ("m24k1", "second largest", 24, 1, 3.93, 34_400, 1.0),
        ("m16k1", "best tokens/s", 16, 1, 3.97, 33_500, 0.25),
        ("m16k2", "best goodput", 16, 2, 3.90, 35_300, 1.0),
        ("m16k2-unscaled", "unscaled contrast", 16, 2, 3.99, 35_300, 0.125),
    )
    for name, role, size, k, floor, rate, stop in candidates:
        learning_rate = scaled_learning_rate(config.optimizer, size * k)
        batch = {"micro_batch_size": size, "gradient_accumulation_steps": k, "learning_rate": learning_rate}
        add_trial(study, config, f"train-{name}", role, **batch)
        _train(config, study, f"train-{name}", floor, rate, stop)
    conclude(study, "train", "train-m16k2 ends at 3.889, 0.12 below the baseline", {"winner": "train-m16k2"})


def _add_learning_rate(config: StudyConfig, study: Study) -> None:
    for multiplier, floor in ((0.5, 3.97), (0.71, 3.92), (1, 3.90), (1.41, 3.93)):
        trial_id = f"learning_rate-x{multiplier}"
        batch = {"micro_batch_size": 16, "gradient_accumulation_steps": 2, "learning_rate": 6e-4 * multiplier}
        add_trial(study, config, trial_id, **batch)
        _train(config, study, trial_id, floor, 35_300)
    add_trial(
        study, config, "learning_rate-x2", micro_batch_size=16, gradient_accumulation_steps=2, learning_rate=1.2e-3
    )
    end_trial(
        study, "learning_rate-x2", 31.0, {"val_loss": None}, "pruned", "diverged: the loss is not finite at step 41"
    )
    values = {"winner": "learning_rate-x1", "on_edge": False}
    conclude(study, "learning_rate", "the rule's learning rate 6.0e-04 is the best of 5", values)
