"""The frontier's verification: the best point once more in a fresh process, and the largest that are to be trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from batchscout.orchestrator.stages.estimates.timing import Timings
from batchscout.orchestrator.stages.frontier.finalists import Finalists
from batchscout.orchestrator.stages.frontier.findings import OperatingPoint
from batchscout.orchestrator.stages.frontier.measured import rate_of
from batchscout.orchestrator.stages.frontier.trials import FrontierTrials
from batchscout.orchestrator.stages.frontier.variants import Variant, variants
from batchscout.orchestrator.stages.probing import disturbed_rounds
from batchscout.orchestrator.study.trial import Proposal, Trial


@dataclass(frozen=True)
class Verification:
    """Which point is the best that holds in a fresh process, as far as the journal knows it."""

    trials: FrontierTrials
    finalists: Finalists

    def proposals(self) -> list[Proposal]:
        """Return trials in a fresh process: of the best point, and of the largest that are to be trained. Where one does
        not fit there, the next one follows."""
        edges = self.finalists.largest_to_train(self.standing()) if self.finalists.trains_other_sizes() else []
        points = [*self._until_one_fits(), *map(self.as_trained, edges)]
        return [self.trials.verification(point) for point in dict.fromkeys(points)]

    def _until_one_fits(self) -> list[OperatingPoint]:
        points = self.by_preference()
        waited_for = next(
            (place for place, point in enumerate(points) if not self.trials.is_refuted(point)), len(points)
        )
        return points[: waited_for + 1]

    def as_trained(self, point: OperatingPoint) -> OperatingPoint:
        """Return the point in the variant that the best one is, which later stages take for all sizes."""
        return point if self._taken is None else self._taken.of(point)

    @cached_property
    def _taken(self) -> Variant | None:
        best = self._until_one_fits()[-1:]
        return self.variant_of(best[0]) if best else None

    def variant_of(self, point: OperatingPoint) -> Variant | None:
        """Return the variant that a finalist is; None of one that was probed."""
        probed = self.finalists.fitting()
        found = (one for one in variants(self.trials.context) for other in probed if one.of(other) == point)
        return None if point in probed else next(found, None)

    def standing(self) -> dict[OperatingPoint, Trial]:
        """Return the probes that fit, without those that did not do so again in a fresh process."""
        fell = {
            point
            for point in self.finalists.fitting()
            if self.trials.is_refuted(point) or self.trials.is_refuted(self.as_trained(point))
        }
        return {point: trial for point, trial in self.finalists.fitting().items() if point not in fell}

    def verified(self) -> OperatingPoint | None:
        """Return the best point that fitted in a fresh process; None if none has."""
        verifications = {point: self.trials.verification_of(point) for point in self.by_preference()}
        return next((point for point, trial in verifications.items() if trial and self.trials.fits(trial)), None)

    def may_be_chosen(self, point: OperatingPoint) -> bool:
        """True if nothing has shown that the point does not fit."""
        verification = self.trials.verification_of(point)
        fitted = verification is None or not verification.state.ended or self.trials.fits(verification)
        return fitted and self.finalists.most_memory(point) <= (self.trials.capacity_bytes() or math.inf)

    def by_preference(self) -> list[OperatingPoint]:
        """Return the points to verify, the best first.

        These are the finalists that fitted in every round: first those that tie for the fastest, the one with the least
        memory leading, then the others by speed. All other points that fit follow, in case no finalist is verified, those last
        that a full run cannot use.
        """
        fitting = self.finalists.fitting()
        usable = self.finalists.usable(fitting)
        others = [point for point in fitting if point not in self.finalists.points]
        others.sort(key=lambda point: (point not in usable, -rate_of(fitting[point])))
        return self._ranked_finalists() + others

    def _ranked_finalists(self) -> list[OperatingPoint]:
        capacity = self.trials.capacity_bytes() or math.inf
        rates = self.finalists.timed.rates if self.finalists.timed else {}
        held = {point: rounds for point, rounds in rates.items() if self.finalists.most_memory(point) <= capacity}
        if not held:
            return [] if self.finalists.num_rounds else self.finalists.points
        timed = Timings(held, disturbed_rounds(self.trials.context))
        tied = sorted(timed.tied(), key=self.finalists.most_memory)
        return tied + [point for point in timed.fastest_first() if point not in tied]
