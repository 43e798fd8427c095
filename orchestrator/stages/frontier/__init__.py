"""How much fits, and what is fast? In every mode a search for the largest micro-batch and a ladder of sizes below it; the
fastest are timed again in turns, and what is chosen must fit once more in a fresh process.

    probes (one dynamic compile a mode) -> timings of the finalists (static shapes, in rounds) -> verification
"""

from orchestrator.stages.frontier.conclude import conclude
from orchestrator.stages.frontier.propose import modes, predicted_modes, prediction_key, propose

__all__ = ["conclude", "modes", "predicted_modes", "prediction_key", "propose"]
