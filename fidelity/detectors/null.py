"""What seamless positions look like: the tail that a line must leave before it counts as a seam.

Counting shifted grids cannot give a p-value of 0.001: a stride of s allows s − 1 shifts, and keeping the decoder's
phase leaves s/f. So controls are brought to one scale and their logarithm is taken for normal, with the quantile of
Student's t for the few that there are. See docs/design/seam-detectors.md for the calibration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

ALPHA = 0.001
"""False alarms allowed a measurement, over all its lines, segments and images together."""
FEWEST = 8
"""Below this many controls nothing is said."""


class Tail(NamedTuple):
    """The critical value of a statistic, and its spread, as factors on the local scale."""

    critical: float
    spread: float
    controls: int

    def p_value(self, ratio: float) -> float:
        """Probability that one seamless position reaches `ratio`."""
        if ratio <= 0:
            return 1.0
        return 1 - NormalDist(math.log(self.median), self.spread or 1e-9).cdf(math.log(ratio))

    @property
    def median(self) -> float:
        return self.critical / math.exp(self.quantile * self.spread)

    quantile: float = 0.0


def tail(ratios: Sequence[float], tests: int, shared: float = 1.0) -> Tail | None:
    """The tail of positive `ratios` at seamless positions, for `tests` looks at once; None if there are too few.

    `shared`: over how many controls one pixel counts; they know as little as that many fewer.
    """
    independent = len(ratios) / shared
    if independent < FEWEST:
        return None
    logs = [math.log(max(ratio, 1e-6)) for ratio in ratios]
    spread = stdev(logs)
    normal = NormalDist().inv_cdf(1 - ALPHA / max(1, tests))
    quantile = student(normal, independent - 1) * math.sqrt(1 + 1 / independent)
    return Tail(math.exp(fmean(logs) + quantile * spread), spread, len(logs), quantile)


def student(z: float, freedom: float) -> float:
    """The quantile of Student's t for that of the normal (Cornish-Fisher, Abramowitz and Stegun 26.7.5)."""
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def excess(effect: float, critical: float) -> float:
    """What is left of an effect beyond its critical value, in quadrature: 0 where it is not significant."""
    return math.sqrt(max(0.0, effect**2 - critical**2))
