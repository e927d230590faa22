"""Clusters of points by Lloyd's algorithm with the steps of scikit-learn 1.9, sklearn/cluster/_kmeans.py."""

from __future__ import annotations

from typing import Any, Final

from .base import expect

PEFT_SEED: Final = 123456789
"""The seed that PEFT uses for AdaMSS."""
ROUNDS: Final = 10


def kmeans(points: Any, count: int) -> Any:
    """Return the cluster [n] of each point of an array [n, r], as KMeans with `init="random"`, `n_init=1` and
    `max_iter=10` does. Raise DoesNotFit where a cluster is empty: scikit-learn fills it with distant points."""
    import numpy as np

    points = points - points.mean(axis=0)
    chosen = np.random.RandomState(PEFT_SEED).choice(
        len(points), count, replace=False, p=np.full(len(points), 1 / len(points))
    )
    centres, before = points[chosen], np.full(len(points), -1)
    enough = 1e-4 * float(points.var(axis=0).mean())
    for _ in range(ROUNDS):
        labels = _nearest(points, centres)
        sizes = np.bincount(labels, minlength=count)
        expect(holds=bool(sizes.all()), otherwise="a cluster of its rows is empty")
        moved = np.zeros_like(centres)
        np.add.at(moved, labels, points)  # one point after another, so that ties are decided alike
        moved *= (1 / sizes.astype(points.dtype))[:, None]
        shift, centres = float(((moved - centres) ** 2).sum()), moved
        if np.array_equal(labels, before):
            return labels
        if shift <= enough:
            break
        before = labels
    return _nearest(points, centres)


def _nearest(points: Any, centres: Any) -> Any:
    return ((centres * centres).sum(axis=1) - 2 * points @ centres.T).argmin(axis=1)
