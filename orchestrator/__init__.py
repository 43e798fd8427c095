"""Many training runs: what to try next, where to run it, what was learned. Imports `trainers`, never the other way."""
