"""Clusters of points, as scikit-learn 1.9 finds them by Lloyd's steps: sklearn/cluster/_kmeans.py."""

from __future__ import annotations

from typing import Any, Final

from .base import expect

SEED: Final = 123456789
"""PEFT's for AdaMSS."""
ROUNDS: Final = 10


def kmeans(points: Any, count: int) -> Any:
    """Return the cluster of each point of an array [n, r], [n], from random points on (`init="random"`, `n_init=1`,
    `max_iter=10`, that seed). DoesNotFit where a cluster has run empty, which scikit-learn fills from afar."""
    import numpy as np

    points = points - points.mean(axis=0)
    chosen = np.random.RandomState(SEED).choice(
        len(points), count, replace=False, p=np.full(len(points), 1 / len(points))
    )
    centres, before = points[chosen], np.full(len(points), -1)
    enough = 1e-4 * float(points.var(axis=0).mean())
    for _ in range(ROUNDS):
        labels = _nearest(points, centres)
        sizes = np.bincount(labels, minlength=count)
        expect(holds=bool(sizes.all()), otherwise="a cluster of its rows ran empty")
        moved = np.zeros_like(centres)
        np.add.at(moved, labels, points)  # one after the other, in the points' precision: so are ties decided alike
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
