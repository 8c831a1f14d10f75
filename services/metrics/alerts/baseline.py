"""What is usual in a series: median and spread that single outliers do not move. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MAD_TO_SIGMA = 1.4826
"""Makes the median absolute deviation of normal noise its standard deviation (Rousseeuw and Croux, 1993)."""


@dataclass(frozen=True)
class Baseline:
    """The middle and spread of numbers."""

    median: float
    sigma: float
    """Robust standard deviation; 0 when half of the numbers are the same."""
    largest: float
    """The largest distance of a number from the median."""

    @property
    def usual(self) -> tuple[float, float]:
        """The range that is called usual in evidence."""
        return self.median - 3 * self.sigma, self.median + 3 * self.sigma


def baseline_of(numbers: Sequence[float]) -> Baseline:
    """The baseline of finite numbers, at least one."""
    median = statistics.median(numbers)
    distances = [abs(number - median) for number in numbers]
    return Baseline(median, MAD_TO_SIGMA * statistics.median(distances), max(distances))
