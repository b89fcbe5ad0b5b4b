"""Ratios of two things timed side by side, with a bound that noise on a shared machine does not fool."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple


class PairedRatio(NamedTuple):
    """Geometric mean of paired ratios and its two-sided 95% bounds."""

    mean: float
    low: float
    high: float
    pairs: int


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> PairedRatio:
    """The ratio ours / theirs over pairs that ran one after the other; bounds by Student's t on the logarithms."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(logs)
    half = _student_t(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return PairedRatio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


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
