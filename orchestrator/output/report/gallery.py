"""All figures of a study, in the order of the page, and one alone as a picture for a notebook or a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import tostring

from batchscout.orchestrator.config.keys import StudyConfig
from batchscout.orchestrator.config.stages import StageKeys
from batchscout.orchestrator.output.plots import element, plot
from batchscout.orchestrator.output.report.shell import text_of
from batchscout.orchestrator.output.report.timeline import timeline
from batchscout.orchestrator.output.report.training import RunCurves, curve_figures
from batchscout.orchestrator.stages import stage_of
from batchscout.orchestrator.stages.context import StageContext
from batchscout.orchestrator.stages.figures import Figure
from batchscout.orchestrator.study.state import Study
from batchscout.trainers.files import quoted, written_whole


@dataclass(frozen=True)
class Picture:
    """A figure of a study. A notebook shows it, `save` writes it as an SVG."""

    figure: Figure

    @property
    def svg(self) -> str:
        tree = plot(self.figure)
        tree.set("xmlns", "http://www.w3.org/2000/svg")
        tree.set("width", str(self.figure.width))
        tree.insert(0, element("style", text_of("figure.css") + "svg { background: var(--paper) }"))
        return tostring(tree, encoding="unicode")

    def save(self, path: str | Path) -> None:
        """Write it as an SVG. Raises ValueError for a name that promises another format, or a folder that is not there."""
        where = Path(path)
        if where.suffix.lower() != ".svg":
            raise ValueError(
                f"a figure is saved as an SVG, and '{where.name}' is the name of something else; call it {where.stem}.svg"
            )
        if not where.parent.is_dir():
            raise ValueError(f"there is no folder {quoted(where.parent)} to save {where.name} in; make it first")
        with written_whole(where) as file:
            file.write(self.svg.encode("utf-8", "replace"))

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        return self.figure.caption or self.figure.name


def in_order(config: StudyConfig, study: Study) -> list[StageKeys]:
    """Return the stages as they stand on the page: those that choose a run first, once they have begun."""
    return sorted(config.stages, key=lambda keys: not (stage_of(keys).trains_candidates and keys.type in study.started))


def all_figures(config: StudyConfig, study: Study, curves: Sequence[RunCurves]) -> Iterator[tuple[str, Figure]]:
    """Yield every figure with the section that it stands in."""
    for keys in in_order(config, study):
        for figure in stage_of(keys).figures(StageContext(keys, config, study)):
            yield keys.type, figure
    for figure in curve_figures(curves):
        yield "training", figure
    if (holds := timeline(study)) is not None:
        yield "time", holds


def picture_of(figures: Iterator[tuple[str, Figure]], name: str) -> Picture:
    """Return the figure of this name, or of `section-name`; of several the first. Raises ValueError where there is none."""
    names = list[str]()
    for section, figure in figures:
        if name in (figure.name, f"{section}-{figure.name}"):
            return Picture(figure)
        names.append(figure.name)
    known = ", ".join(dict.fromkeys(names)) or "none yet: no trial has been measured"
    raise ValueError(f"this study has no figure '{name}'; it has: {known}")
