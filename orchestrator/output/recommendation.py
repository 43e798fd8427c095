"""From a study to what to type into a trainer: recommendation.json, with reason, margin and what was ruled out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchestrator.config.keys import StudyConfig
from orchestrator.stages.mode import mode_of
from orchestrator.stages.ranking import LOSS_TIE
from orchestrator.study.state import Study, Trial, TrialState
from orchestrator.units import bytes_text
from trainers.config import TrialConfig
from trainers.files import written_whole

_EVIDENCE = (
    "val_loss", "perplexity", "tokens_per_second", "step_seconds", "peak_memory_bytes", "train_seconds",
    "noise_scale", "noise_scale_low", "noise_scale_high", "coherence", "coherence_floor", "mfu",
)  # fmt: skip


def recommend(config: StudyConfig, study: Study) -> dict[str, Any] | None:
    """The recommendation as far as the study has come; None while no full run has won."""
    winner = _winner(study)
    if winner is None:
        return None
    trial = winner.config
    return {
        "micro_batch_size": trial.micro_batch_size,
        "gradient_accumulation_steps": trial.gradient_accumulation_steps,
        "world_size": trial.world_size,
        "effective_batch_size": trial.effective_batch_size,
        "activation_checkpointing": trial.activation_checkpointing,
        "compile": trial.compile,
        "precision": trial.precision,
        **_chunks(trial),
        "learning_rate": trial.learning_rate,
        "warmup_samples": trial.warmup_samples,
        "sample_budget": trial.sample_budget,
        "optimizer": trial.optimizer.model_dump(mode="json"),
        "schedule": trial.schedule.model_dump(mode="json"),
        "seed": trial.seed,
        "verdict": _verdict(study, winner),
        "complete": all(stage.type in study.conclusions for stage in config.stages),
        "evidence": _evidence(study, winner),
        "alternatives": _alternatives(study, winner),
        "ruled_out": _ruled_out(study),
    }


def _chunks(trial: TrialConfig) -> dict[str, str]:
    """Said only where it is not as usual."""
    kind = mode_of(trial).cross_entropy
    return {} if kind == "whole" else {"cross_entropy": kind}


def _winner(study: Study) -> Trial | None:
    for stage in ("learning_rate", "train", "grid"):
        name = study.value(stage, "winner")
        if name:
            return study.trials[name]
    return None


def _verdict(study: Study, winner: Trial) -> str:
    trial = winner.config
    mode = str(trial.activation_checkpointing) + (", cross-entropy in chunks" if _chunks(trial) else "")
    batch = (
        f"Train with micro-batch {trial.micro_batch_size}, {_times(trial.gradient_accumulation_steps)}"
        f"(effective batch {trial.effective_batch_size}), activation checkpointing {mode} "
        f"and learning rate {trial.learning_rate:.3g}"
    )
    edge = " The learning rate is the last one tried on its side: a further one may be better."
    on_edge = winner.stage == "learning_rate" and study.value("learning_rate", "on_edge")
    return f"{batch}: {_against_baseline(study, winner)}.{edge if on_edge else ''}"


def _times(accumulation: int) -> str:
    return "no accumulation " if accumulation == 1 else f"{accumulation} accumulation steps "


def _against_baseline(study: Study, winner: Trial) -> str:
    loss = winner.metrics["val_loss"]
    baseline = next((t for t in study.trials.values() if t.protected and t.state is TrialState.COMPLETE), None)
    if baseline is None:
        return f"it ends at val loss {loss:.3f}, the best of what was run"
    ours = winner.config
    if (baseline.config.micro_batch_size, baseline.config.gradient_accumulation_steps) == (
        ours.micro_batch_size, ours.gradient_accumulation_steps,
    ):  # fmt: skip
        return (
            f"at the rule's learning rate no batch that was tried beat the baseline's (val loss "
            f"{baseline.metrics['val_loss']:.3f}) by more than a tie's width, {LOSS_TIE:.1%}, so the batch is not your "
            f"bottleneck{_at_its_rate(winner, baseline)}"
        )
    speed = _ratio(winner, baseline, "tokens_per_second")
    return f"val loss {loss:.3f} against the baseline's {baseline.metrics['val_loss']:.3f} at equal samples{speed}"


def _at_its_rate(winner: Trial, baseline: Trial) -> str:
    if winner.config.learning_rate == baseline.config.learning_rate:
        return ""
    return f"; this learning rate brings it to {winner.metrics['val_loss']:.3f}"


def _ratio(winner: Trial, baseline: Trial, key: str) -> str:
    ours, theirs = winner.metrics.get(key), baseline.metrics.get(key)
    return f", at {ours / theirs:.2f} x its tokens/s" if ours and theirs else ""


def _evidence(study: Study, winner: Trial) -> dict[str, Any]:
    limit = study.value("frontier", "limit_bytes")
    peak = winner.metrics.get("peak_memory_bytes")
    found: dict[str, Any] = {"trial": winner.id}
    found |= {key: winner.metrics[key] for key in _EVIDENCE if winner.metrics.get(key) is not None}
    if limit and peak is not None:
        found |= {"memory_limit_bytes": limit, "memory_margin_bytes": limit - peak}
        found["memory"] = f"{bytes_text(peak)} of {bytes_text(limit)}, {bytes_text(limit - peak)} left"
    found["stages"] = {stage: conclusion.reason for stage, conclusion in study.conclusions.items()}
    found["notes"] = [*_of_the_model(study), *(note for c in study.conclusions.values() for note in c.notes)]
    return found


def _of_the_model(study: Study) -> list[str]:
    layers = study.facts.get("num_batch_norms")
    if not layers:
        return []
    return [
        f"the model has {layers} BatchNorm layers: their statistics are a micro-batch's, so accumulation changes them"
    ]


def _alternatives(study: Study, winner: Trial) -> list[dict[str, Any]]:
    """The other configurations that finished, best first."""
    others = [
        trial
        for trial in study.trials.values()
        if trial.stage in ("train", "grid", "learning_rate")
        and trial.state is TrialState.COMPLETE
        and trial.id != winner.id
    ]
    return [
        {
            "trial": t.id,
            "role": t.role,
            "micro_batch_size": t.config.micro_batch_size,
            "gradient_accumulation_steps": t.config.gradient_accumulation_steps,
            "learning_rate": t.config.learning_rate,
            "val_loss": t.metrics.get("val_loss"),
            "tokens_per_second": t.metrics.get("tokens_per_second"),
        }
        for t in sorted(others, key=lambda trial: trial.metrics.get("val_loss", float("inf")))
    ]


def _ruled_out(study: Study) -> list[dict[str, str]]:
    out = (TrialState.PRUNED, TrialState.OUT_OF_MEMORY, TrialState.FAILED)
    return [{"trial": t.id, "state": t.state, "reason": t.reason} for t in study.trials.values() if t.state in out]


def write_recommendation(path: Path, recommendation: dict[str, Any] | None) -> None:
    """Whole or absent; nothing is written while there is nothing to recommend."""
    if recommendation is None:
        return
    with written_whole(path) as file:
        file.write((json.dumps(recommendation, indent=2) + "\n").encode())
