"""Estimates of a mean, with their errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from supervisor.bench.student import t_quantile

# Beyond these degrees of freedom the quantiles are within 1 % of the normal distribution's.
_MAX_DEGREES: Final = 200


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, with its standard error and the degrees of freedom of this error."""

    mean: float
    error: float
    degrees: int

    def half_width(self, level: float) -> float:
        return t_quantile(level, self.degrees) * self.error


def of_values(values: Sequence[float]) -> Estimate:
    """Estimate the mean of at least two independent values."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(statistics.fmean(values), error, len(values) - 1)


def of_clusters(clusters: Sequence[Sequence[float]]) -> Estimate:
    """Estimate the mean over all values, with the error that the means of clusters tell.

    The cluster-robust error of a mean; its degrees of freedom are those of the effective number of
    clusters, which is lower where a few hold most values.
    Source: Cameron and Miller, A Practitioner's Guide to Cluster-Robust Inference, 2015.
    """
    sizes = [len(cluster) for cluster in clusters]
    total, count = sum(sizes), len(sizes)
    mean = math.fsum(value for cluster in clusters for value in cluster) / total
    squares = math.fsum((math.fsum(cluster) - mean * len(cluster)) ** 2 for cluster in clusters)
    error = math.sqrt(squares * count / (count - 1)) / total
    effective = total**2 / sum(size**2 for size in sizes)
    return Estimate(mean, error, max(1, int(effective) - 1))


def difference(base: Estimate, other: Estimate) -> Estimate:
    """Subtract two independent estimates. Source: Welch, 1947, for the degrees of freedom."""
    variances = (base.error**2, other.error**2)
    parts = variances[0] ** 2 / base.degrees + variances[1] ** 2 / other.degrees
    degrees = sum(variances) ** 2 / parts if parts else base.degrees + other.degrees
    return Estimate(
        other.mean - base.mean, math.sqrt(sum(variances)), max(1, min(_MAX_DEGREES, int(degrees)))
    )
