"""All figures of a study, in the order of the page, and one alone as a picture for a notebook or a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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


@dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        return f"<figure {self.figure.name}>"


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


class Figures(dict[str, Picture]):
    """The figures of a study by their names, in the order of the page. Each may be had as `section-name`, too."""

    def __init__(self, figures: Iterable[tuple[str, Figure]]) -> None:
        self._by_section = dict[str, Picture]()
        for section, figure in figures:
            name = figure.name if figure.name not in self else f"{section}-{figure.name}"
            self[name] = self._by_section[f"{section}-{figure.name}"] = Picture(figure)

    def __missing__(self, name: str) -> Picture:
        if name in self._by_section:
            return self._by_section[name]
        known = ", ".join(self) or "none yet: no trial has been measured"
        raise KeyError(f"this study has no figure '{name}'; it has: {known}")

    def __repr__(self) -> str:
        return f"<figures: {', '.join(self)}>"
