"""The report's size, and how soon it shows something, for 10, 100, 1,000 and 10,000 trials.

    python benchmarks/report_page.py [--device cpu|cuda] [--quick]

The studies are those of `reading_scale`: grids of as many learning rates. Each page is opened in a headless Chromium, which must be
installed, from a file, in a window of 1200 x 900: `first_paint_seconds` is when text and pictures are seen
(first-contentful-paint), `ready_seconds` when the script answers the pointer. `cpu_seconds` is what writing the page takes,
without the replay of the journal. Medians of several openings; the machine's other work counts.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from reading_scale import write_study
from side_by_side import machine, options

from batchscout.orchestrator.output.recommendation import recommend
from batchscout.orchestrator.output.report.page import write_report
from batchscout.orchestrator.study.journal import replay
from batchscout.orchestrator.study.run_directory import load_stored_study

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.browser import Browser

NUM_TRIALS, NUM_OPENINGS = (10, 100, 1_000, 10_000), 7
HAS_PAINTED = "performance.getEntriesByName('first-contentful-paint').length > 0"
IS_READY = "performance.getEntriesByName('ready').length > 0"
TIMES = "['first-contentful-paint', 'ready'].map(name => performance.getEntriesByName(name)[0].startTime / 1000)"


def main() -> None:
    chosen = options(__doc__)
    sizes, openings = (NUM_TRIALS[:3], 2) if chosen.quick else (NUM_TRIALS, NUM_OPENINGS)
    print(machine())
    found = {}
    with Browser() as browser:
        browser.show_as(1200, 900)
        for num_trials in sizes:
            found[str(num_trials)] = one = measured(num_trials, openings, browser)
            print(f"{num_trials:>6} trials: " + ", ".join(f"{name} {value:,.4g}" for name, value in one.items()))
    names = ("size_bytes", "cpu_seconds", "first_paint_seconds", "ready_seconds")
    print(json.dumps({name: {trials: one[name] for trials, one in found.items()} for name in names}))


def measured(num_trials: int, openings: int, browser: Browser) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        run_dir, page = Path(folder), Path(folder) / "report.html"
        write_study(run_dir, num_trials)
        config = load_stored_study(run_dir / "study.yaml")
        study = replay(run_dir / "journal.jsonl", config.name)
        started = time.process_time()
        write_report(page, config, study, recommend(config, study))
        cpu_seconds = time.process_time() - started
        times = [opened(page, browser) for _ in range(openings)]
        paint, ready = (statistics.median(one) for one in zip(*times, strict=True))
        return {
            "size_bytes": page.stat().st_size,
            "cpu_seconds": cpu_seconds,
            "first_paint_seconds": paint,
            "ready_seconds": ready,
        }


def opened(page: Path, browser: Browser) -> list[float]:
    browser.open(page)
    browser.until(HAS_PAINTED)
    browser.until(IS_READY)
    return browser.evaluate(TIMES)


if __name__ == "__main__":
    main()
