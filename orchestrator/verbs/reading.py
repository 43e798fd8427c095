"""Verbs that read what a study has written."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.terminal import printable
from trainers.files import own_file, quoted

if TYPE_CHECKING:
    from orchestrator.config.keys import StudyConfig
    from orchestrator.study.state import Study


def status(arguments: argparse.Namespace) -> int:
    """Show stages, trials, states, the best so far, and why each was pruned."""
    from orchestrator.output.status import json_pieces
    from orchestrator.output.watch import watch
    from orchestrator.study.lock import is_locked

    if arguments.json:
        sys.stdout.writelines(json_pieces(*_open(arguments.run_dir)))
        return 0
    if not arguments.watch:
        _show_status(arguments.run_dir)
        return 0
    journal = arguments.run_dir / "journal.jsonl"

    def state() -> tuple[int, bool]:
        with own_file(journal, "read"):
            return (journal.stat().st_size if journal.exists() else 0), is_locked(journal)

    watch(lambda: _show_status(arguments.run_dir), state)
    return 0


def _show_status(run_dir: Path) -> bool:
    """Show it for people; return whether the study is over."""
    from orchestrator.output.status import print_status
    from orchestrator.study.lock import is_locked

    config, study = _open(run_dir)
    print_status(config, study, is_driven=is_locked(run_dir / "journal.jsonl"))
    return study.is_over(stage.type for stage in config.stages)


def report(arguments: argparse.Namespace) -> int:
    """Write report.html and recommendation.json again from the journal; or compare two studies."""
    from orchestrator.output.results import write_results

    if arguments.other is not None:
        return _write_comparison(arguments.run_dir, arguments.other)
    config, study = _open(arguments.run_dir)
    write_results(config, arguments.run_dir, study)
    print(quoted(arguments.run_dir / "report.html"))
    return 0


def _write_comparison(first: Path, second: Path) -> int:
    """Write how two studies differ beside the second one's report, and say whether their answers do."""
    from orchestrator.output.comparison import agreement, read_sides
    from orchestrator.output.report.comparison import write_comparison

    one, other = read_sides(first, second)
    write_comparison(second / "comparison.html", one, other)
    print(f"{printable(agreement(one, other))}\n{quoted(second / 'comparison.html')}")
    return 0


def compare(arguments: argparse.Namespace) -> int:
    """Show what was different between two studies, and whether their answers are."""
    from orchestrator.output.comparison import compared, print_comparison, read_sides

    both = compared(*read_sides(arguments.run_dir, arguments.other))
    if arguments.json:
        print(json.dumps(both.to_json(), indent=2))
    else:
        print_comparison(both)
    return 0


def explain(arguments: argparse.Namespace) -> int:
    """Show why a trial ran, what was decided with it, its result, and what it cost."""
    from orchestrator.output.explained import explain_trial, print_explanation
    from orchestrator.output.loaded import load

    told = explain_trial(load(arguments.run_dir), arguments.trial)
    if arguments.json:
        print(json.dumps(told.to_json(), indent=2))
    else:
        print_explanation(told)
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Print the recommendation as another trainer's configuration."""
    from orchestrator.output.exports import export as export_text
    from orchestrator.output.recommendation import Recommendation

    path = arguments.run_dir / "recommendation.json"
    with own_file(path, "read"):
        text = path.read_text() if path.exists() else None
    if text is None:
        raise ValueError(f"there is no {quoted(path)}; finish the study first: batchscout run")
    print(printable(export_text(Recommendation.from_json(text), arguments.to)))
    return 0


def _open(run_dir: Path) -> tuple[StudyConfig, Study]:
    """Return a study, and its file, as its run directory has them; read only."""
    from orchestrator.output.loaded import load

    study = load(run_dir)
    return study.config, study.replayed
