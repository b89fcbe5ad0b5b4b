"""Ratios of two things timed side by side, with a bound that noise on a shared machine does not fool."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

# With fewer pairs no ranks are as unlikely as 5%.
FEWEST_RANKED = 6


class PairedRatio(NamedTuple):
    """The middle of paired ratios and its two-sided 95% bounds."""

    middle: float
    low: float
    high: float
    pairs: int


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> PairedRatio:
    """The ratio ours / theirs over pairs that ran one after the other.

    On a shared machine now and then one side of a pair is held up for as long as it takes otherwise: means, and bounds
    by Student's t, follow such pairs wherever they go. So the middle is that of Hodges and Lehmann (the median of the
    means of all two logarithms, each with itself too), and the bounds are those of Wilcoxon's signed ranks. With fewer
    than 6 pairs: their mean, with bounds by Student's t.
    """
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    count = len(logs)
    if count < FEWEST_RANKED:
        mean = statistics.fmean(logs)
        half = _student_t(count - 1) * statistics.stdev(logs) / math.sqrt(count) if count > 1 else math.inf
        return PairedRatio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), count)
    means = sorted((logs[i] + logs[j]) / 2 for i in range(count) for j in range(i, count))
    spread = math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    # How many of these means lie beyond a bound is distributed like the sum of signed ranks: nearly normally.
    outside = max(0, math.floor(len(means) / 2 - statistics.NormalDist().inv_cdf(0.975) * spread) - 1)
    bounds = statistics.median(means), means[outside], means[-1 - outside]
    return PairedRatio(*map(math.exp, bounds), count)


def _student_t(freedom: int) -> float:
    """The 97.5% point of Student's t, by the Cornish-Fisher expansion; within 1% from 4 degrees of freedom on."""
    z = statistics.NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def alternate(first: Callable[[], float], second: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    """Time two things in turn, each first in every other round, so that drift hits both alike; seconds of each."""
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(rounds):
        order = [(first, ours), (second, theirs)]
        for run, seconds in order if number % 2 == 0 else order[::-1]:
            seconds.append(run())
    return ours, theirs
