"""The top of the page: what to train with, how sure that is, what it would cost to know better, and the lines to paste."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element, tostring

import yaml
from pydantic import JsonValue

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.output.answer import RUN_DIR
from batchscout.orchestrator.output.exports import export, trainers_of
from batchscout.orchestrator.output.known import failed_stage
from batchscout.orchestrator.output.plots import element
from batchscout.orchestrator.output.recommendation import Recommendation
from batchscout.orchestrator.output.report.pieces import within
from batchscout.orchestrator.output.report.tables import config_text, facts_table, heading, notes_list, value_element
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.study.state import Study
from batchscout.trainers.config import OptimizerConfig

_RECOMMENDED = (
    "micro_batch_size",
    "micro_batch_tokens",
    "gradient_accumulation_steps",
    "world_size",
    "effective_batch_size",
    "activation_checkpointing",
    "compile",
    "precision",
    "learning_rate",
    "warmup_samples",
)


def answer_section(
    config: StudyConfig, study: Study, recommendation: Recommendation | None, charts: Sequence[Element] = ()
) -> Iterator[str]:
    """Yield the answer with what it rests on. charts: what stands beside it."""
    section = element("section", id="recommendation")
    if recommendation is None:
        return within(section, *_known_so_far(config, study))
    values = recommendation.to_json()
    missing = _what_is_missing(config, study)
    facts = {key: values[key] for key in (*_RECOMMENDED, "cross_entropy", "memory_knobs", "ramp") if key in values}
    return within(
        section,
        element("div", _five_lines(recommendation, "below"), *charts, class_="top"),
        element("p", f"Provisional, as far as the study has come. {missing}.") if missing else None,
        _other_caveats(recommendation),
        element(
            "div",
            element("div", facts_table(facts)),
            element("div", *_to_type_in(config, recommendation), class_="wide"),
            class_="columns",
        ),
    )


def _five_lines(r: Recommendation, others_are: str) -> Element:
    """Return the answer, green where it is decided. others_are: where the other caveats stand."""
    sure = "decided" if r.answer.is_decided else "open"
    lines = r.answer.lines(others_are=others_are)
    next_ = element("div", element("dt", "Next"), element("dd", *_with_its_command(lines.pop("Next"))))
    rows = [
        element("div", element("dt", label), element("dd", text), class_=sure if label == "Verdict" else None)
        for label, text in lines.items()
    ]
    return element("dl", *rows, next_, class_="answer")


def _with_its_command(text: str) -> list[str | Element]:
    words, _, command = text.rpartition("\n")
    if not command.startswith("batchscout "):
        return [text]
    folder = f" ({RUN_DIR} is the folder of this report)" if RUN_DIR in command else ""
    return [f"{words} " if words else "", element("code", command), folder]


def _other_caveats(r: Recommendation) -> Element:
    """Return what else limits it, and the sentence with all figures, folded."""
    others = notes_list(r.answer.caveats[1:])
    return element(
        "div",
        None if others is None else element("h3", "What else limits it"),
        others,
        element("details", element("summary", "The verdict with all its figures"), element("p", r.verdict)),
    )


def _to_type_in(config: StudyConfig, recommendation: Recommendation) -> list[Element]:
    """Return the lines for this program and for every trainer, each with a button that copies them."""
    texts = {"batchscout": paste_text(recommendation, config.optimizer)}
    texts |= {trainer: export(recommendation, trainer) for trainer in trainers_of(recommendation)}
    buttons = [
        element("button", trainer, type="button", data_copies=f"lines-{trainer}", title=f"Copy the lines for {trainer}")
        for trainer in texts
    ]
    lines = [
        element(
            "details",
            element("summary", trainer),
            element("pre", text, id=f"lines-{trainer}", tabindex=0),
            name="lines",
        )
        for trainer, text in texts.items()
    ]
    said = element("span", role="status", class_="copied muted")
    return [
        element("h3", "Use these settings"),
        element("p", "Copy for ", *buttons, said, class_="copy scripted"),
        *lines,
    ]


def short_answer(name: str, verdict: str, recommendation: Recommendation | None) -> str:
    """Return the answer as HTML that a notebook shows among its own."""
    values = recommendation.to_json() if recommendation else {}
    facts = {key: values[key] for key in (*_RECOMMENDED, "p_best") if key in values}
    said = _five_lines(recommendation, "in the report") if recommendation else element("p", verdict)
    whole = element("div", element("p", element("b", name)), said, facts_table(facts) if facts else None)
    return tostring(whole, encoding="unicode", method="html")


def evidence_section(recommendation: Recommendation) -> Element:
    """Return what recommendation.json says beside the answer, folded."""
    values = recommendation.to_json()
    parts = [
        element("details", element("summary", title), element("div", value_element(key, values[key]), class_="scroll"))
        for key, title in (("evidence", "Evidence"), ("alternatives", "Alternatives"), ("ruled_out", "Ruled out"))
        if values[key]
    ]
    head = heading("The evidence", "What else does recommendation.json say?")
    return element("section", head, *parts, id="evidence")


def _what_is_missing(config: StudyConfig, study: Study) -> str:
    """Return which stages have found nothing, and whether they still may; empty where all have concluded."""
    missing = ", ".join(stage.type for stage in config.stages if stage.type not in study.conclusions)
    if failed := failed_stage(study):
        return f"The study ended at {failed.stage}: {failed.reason}{f'. Not run: {missing}' if missing else ''}"
    return f"Still open: {missing}" if missing else ""


def _known_so_far(config: StudyConfig, study: Study) -> list[Element]:
    """Return why there is no recommendation, and what has been found."""
    missing = _what_is_missing(config, study)
    if failed_stage(study):
        verdict = f"No recommendation. {missing}."
    elif missing:
        verdict = f"Unfinished: no recommendation yet. {missing}."
    elif any(stage_of(stage).trains_candidates for stage in config.stages):
        verdict = "Undetermined: every stage has concluded, and what they found makes no recommendation."
    else:
        verdict = "No recommendation: none of the study's stages trains what could be one."
    found = [
        element("li", element("b", conclusion.stage), f": {conclusion.reason}")
        for conclusion in study.conclusions.values()
    ]
    known = [element("h3", "Known so far"), element("ul", *found)] if found else []
    return [element("p", verdict, class_="verdict"), *known]


def paste_text(recommendation: Recommendation, optimizer: OptimizerConfig) -> str:
    """Return the recommendation as keys of a study file, and as one training run. optimizer: the study file's."""
    r, optimizer_keys = recommendation, _optimizer_keys(recommendation, optimizer)
    varied = {
        "micro_batch_size": r.micro_batch_size,
        "effective_batch_size": r.effective_batch_size,
        "activation_checkpointing": r.activation_checkpointing,
        "compile": r.compile,
    }
    keys = {
        "precision": r.precision,
        "world_size": r.world_size,
        "optimizer": optimizer_keys,
        "batch": _batch_keys(r),
        **({"memory_knobs": list(r.memory_knobs)} if r.memory_knobs else {}),
        **({"model": {"kwargs": _model_keys(r)}} if _model_keys(r) else {}),
        **({"sample_budget": r.sample_budget, "real_run": None} if r.real_run else {}),
        "stages": [{"type": "grid"} | {key: [value] for key, value in varied.items()}],
    }
    text = yaml.safe_dump(keys, default_flow_style=None, sort_keys=False, width=100)
    grows = (
        "# the batch is to grow (ramp), which a study file cannot express: this is its first phase\n" if r.ramp else ""
    )
    return f"# keys of the study file, with another name or --dir; its other keys stay\n{grows}{text}\n{_trial_command(r, optimizer_keys)}"


def _optimizer_keys(r: Recommendation, optimizer: OptimizerConfig) -> dict[str, JsonValue]:
    """Return the keys with which the study file gives this optimizer. At the reference batch no rule changes anything."""
    keys: dict[str, JsonValue] = {
        "lr": r.learning_rate,
        "reference_batch_size": r.effective_batch_size,
        "warmup": r.warmup_samples,
    }
    if r.optimizer.betas != optimizer.betas:
        keys["betas"] = list(r.optimizer.betas)
    if r.optimizer.weight_decay != optimizer.weight_decay:
        keys["weight_decay"] = r.optimizer.weight_decay
    return keys


def _model_keys(r: Recommendation) -> dict[str, JsonValue]:
    return {**({"cross_entropy": r.cross_entropy} if r.cross_entropy else {}), **(r.model_changes or {})}


def _batch_keys(r: Recommendation) -> dict[str, JsonValue]:
    return {"micro_batch_size": r.micro_batch_size, "gradient_accumulation_steps": r.gradient_accumulation_steps}


def _trial_command(r: Recommendation, optimizer_keys: dict[str, JsonValue]) -> str:
    overrides = {f"batch.{key}": value for key, value in _batch_keys(r).items()}
    overrides |= {f"optimizer.{key}": value for key, value in optimizer_keys.items()}
    overrides |= {
        "activation_checkpointing": config_text(r.activation_checkpointing),
        "compile": config_text(r.compile),
        "precision": r.precision,
        "world_size": r.world_size,
        **({"memory_knobs": f"[{', '.join(r.memory_knobs)}]"} if r.memory_knobs else {}),
        **({"sample_budget": r.sample_budget, "real_run": "null"} if r.real_run else {}),
    }
    overrides |= {f"model.kwargs.{key}": value for key, value in _model_keys(r).items()}
    flags = "".join(f" \\\n  --set {shlex.quote(f'{key}={value}')}" for key, value in overrides.items())
    return f"# or one training run, in this process\nbatchscout trial study.yaml{flags}"
