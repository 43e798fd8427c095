"""A study as a job of a cluster's scheduler: what is submitted, and what the job runs on each of its nodes."""

from __future__ import annotations

import sys

RAY = (sys.executable, "-m", "ray.scripts.scripts")
"""The command `ray` of this Python: pip puts its file beside that in a virtual environment, and elsewhere of a user or a distribution."""
