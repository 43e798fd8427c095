"""Verbs that read what a study has written."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from batchscout.orchestrator.study.storage.place import RunPlace, beside, refuse_file
from batchscout.orchestrator.terminal import printable
from batchscout.orchestrator.verbs.study_file import copy_to_read
from batchscout.trainers.files import exists, own_file, quoted

if TYPE_CHECKING:
    from batchscout.orchestrator.config.keys import StudyConfig
    from batchscout.orchestrator.study.state import Study


def status(arguments: argparse.Namespace) -> int:
    """Show stages, trials, states, the best so far, and why each was pruned."""
    from batchscout.orchestrator.output.status import json_pieces, status_in_a_window
    from batchscout.orchestrator.output.watch import watch
    from batchscout.orchestrator.study.storage.lock import is_locked

    place: RunPlace = arguments.run_dir
    if arguments.json:
        with copy_to_read(place) as run_dir:
            sys.stdout.writelines(json_pieces(*_open(run_dir), is_driven=_is_driven(place)))
        return 0
    if not arguments.watch:
        _show_status(place)
        return 0
    if not isinstance(place, Path):
        raise ValueError(f"--watch looks again every second, and {place} is in an object store; leave --watch out")
    journal = place / "journal.jsonl"

    def state() -> tuple[int, bool]:
        with own_file(journal, "read"):
            return (journal.stat().st_size if exists(journal) else 0), is_locked(journal)

    def in_a_window(rows: int) -> tuple[str, bool]:
        config, study = _open(place)
        text = status_in_a_window(config, study, quoted(str(place)), is_driven=_is_driven(place), rows=rows)
        return text, study.is_over(config.stages)

    try:
        watch(in_a_window, lambda: _show_status(place), state)
    except KeyboardInterrupt:  # of who watches; the study goes on
        return 130
    return 0


def _show_status(place: RunPlace) -> bool:
    """Show it for people; return whether the study is over."""
    from batchscout.orchestrator.output.status import print_status

    with copy_to_read(place) as run_dir:
        config, study = _open(run_dir)
    print_status(config, study, quoted(str(place)), is_driven=_is_driven(place))
    return study.is_over(config.stages)


def _is_driven(place: RunPlace) -> bool:
    """True if a driver runs the study now."""
    from batchscout.orchestrator.study.storage.lock import is_locked
    from batchscout.orchestrator.study.storage.object_lease import is_stored_study_run

    return is_locked(place / "journal.jsonl") if isinstance(place, Path) else is_stored_study_run(place)


def report(arguments: argparse.Namespace) -> int:
    """Write report.html and recommendation.json again from the journal; or compare two studies."""
    from batchscout.orchestrator.output.results import write_results
    from batchscout.orchestrator.study.storage.stored_study import publish_results

    if arguments.other is not None:
        return _write_comparison(arguments.run_dir, arguments.other)
    place: RunPlace = arguments.run_dir
    with copy_to_read(place) as run_dir:
        config, study = _open(run_dir)
        write_results(config, run_dir, study, is_driven=_is_driven(place))
        if not isinstance(place, Path):
            publish_results(place, run_dir)
    print(beside(place, "report.html"))
    return 0


def _write_comparison(first: RunPlace, second: RunPlace) -> int:
    """Write how two studies differ beside the second one's report, and say whether their answers do."""
    from batchscout.orchestrator.output.comparison import agreement, read_sides
    from batchscout.orchestrator.output.report.comparison import write_comparison

    with copy_to_read(first) as one_dir, copy_to_read(second) as other_dir:
        one, other = read_sides(one_dir, other_dir, (first, second))
        write_comparison(other_dir / "comparison.html", one, other)
        if not isinstance(second, Path):
            second.upload(other_dir / "comparison.html", "comparison.html")
    print(f"{printable(agreement(one, other))}\n{beside(second, 'comparison.html')}")
    return 0


def compare(arguments: argparse.Namespace) -> int:
    """Show what was different between two studies, and whether their answers are."""
    from batchscout.orchestrator.output.comparison import compared, print_comparison, read_sides

    with copy_to_read(arguments.run_dir) as one, copy_to_read(arguments.other) as other:
        both = compared(*read_sides(one, other, (arguments.run_dir, arguments.other)))
    if arguments.json:
        print(json.dumps(both.to_json(), indent=2))
    else:
        print_comparison(both)
    return 0


def explain(arguments: argparse.Namespace) -> int:
    """Show why a trial ran, what was decided with it, its result, and what it cost."""
    from batchscout.orchestrator.output.explained import kept_at, print_explanation
    from batchscout.orchestrator.output.loaded import load
    from batchscout.orchestrator.output.status import state_text

    with copy_to_read(arguments.run_dir) as run_dir:
        told = load(run_dir).explain(arguments.trial)
        if not isinstance(arguments.run_dir, Path):
            told = kept_at(told, run_dir, arguments.run_dir)
    state = state_text(told.state, is_driven=_is_driven(arguments.run_dir))
    if arguments.json:
        print(json.dumps(told.to_json(), indent=2))
    else:
        print_explanation(told, state)
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Print the recommendation as another trainer's configuration."""
    from batchscout.orchestrator.output.exports import export as export_text
    from batchscout.orchestrator.output.exports import first_trainer
    from batchscout.orchestrator.output.loaded import load, no_recommendation
    from batchscout.orchestrator.output.recommendation import Recommendation

    with copy_to_read(arguments.run_dir) as run_dir:
        refuse_file(run_dir)
        path = run_dir / "recommendation.json"
        with own_file(path, "read"):
            # Where there is a journal, the file may hold an earlier answer.
            text = path.read_text() if exists(path) and not exists(run_dir / "journal.jsonl") else None
        if text is not None and arguments.to is not None:
            recommendation, to = Recommendation.from_json(text), arguments.to
        else:
            study = load(run_dir)
            recommendation = study.recommendation
            if recommendation is None:
                raise ValueError(no_recommendation(study.config, study.replayed, quoted(str(arguments.run_dir))))
            to = arguments.to or first_trainer(study.config, study.replayed.facts.own_run)
    print(printable(export_text(recommendation, to, quoted(str(arguments.run_dir)))))
    return 0


def _open(run_dir: Path) -> tuple[StudyConfig, Study]:
    """Return a study, and its file, as its run directory has them; read only."""
    from batchscout.orchestrator.output.loaded import load

    study = load(run_dir)
    return study.config, study.replayed
