"""The page of every metric of a trial, made of the table by which reports name them."""

from __future__ import annotations

from batchscout.trainers.metrics import METRICS

INTRODUCTION = """\
# Every metric of a trial

Under these names they are in `status --json`, in `explain --json`, in the data frame of `study.trials()` and in the trackers; where a report
calls one otherwise, its heading stands beside it. Numbers are in the unit that the name ends with. One that was not measured is absent.

| name | in reports | what it is |
|---|---|---|
"""


def page() -> str:
    """Return the page."""
    rows = []
    for name, metric in METRICS.items():
        rows.append(f"| `{name}` | {metric.headline} | {metric.meaning.replace('|', chr(92) + '|')} |\n")
    return INTRODUCTION + "".join(rows)
