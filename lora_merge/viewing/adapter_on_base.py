"""The fit of an adapter on a base: modules by part and pattern, strengths, sizes, and what is lost to the dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..adapters.modules import group, weight_shapes
from ..errors import FitError
from ..files.checkpoint import Index, open_checkpoint
from ..job import Adapter, make_job
from ..matching.fit_errors import explain
from ..models.names import Names, names
from ..planning.make_plan import Inputs, Matched, make_plan, match
from ..planning.plan import Plan
from ..text import by_pattern
from .adapter import spread


def fit(path: Path, base: Index, adapter: Adapter, numbers: Callable[[Plan], Any] | None = None) -> dict[str, Any]:
    """Return how the adapter fits the base at `path`: `fits`, and what matched or why nothing can.

    `numbers`: returns the size of the change and how much of it the base's dtype keeps, which the result has then.
    """
    job = make_job(path, [adapter], path, unmatched="skip")
    file = group(open_checkpoint(adapter.path, adapter=True))
    lookup = names(base)
    found: dict[str, Any] = {"adapter": str(adapter.path), "strength": adapter.strength, "total": len(file.modules)}
    try:
        matched = match(Inputs.joined(job, base, lookup, (file,)))
    except FitError as e:
        error = {"what": e.what, "where": e.where, "fix": e.fix}
        return {**found, "fits": False, "matched": None, "why": f"{e.what}: {e.where}; {e.fix}", "error": error}
    (one,) = matched.adapters
    why = explain(lookup, list(one.unmatched), weight_shapes(file.modules)) if one.unmatched else ""
    plan = make_plan(Matched(matched.inputs, matched.adapters))
    return {
        **found, "fits": not one.unmatched and bool(one.modules), "algorithms": list(one.algorithms),
        "matched": one.modules, "total": one.total, "components": dict(one.components),
        "strengths": {part: {f"{s:g}": n for s, n in sorted(c.items())} for part, c in one.strengths.items()},
        "effective": _effective(matched, lookup),
        "patterns": {pattern: len(some) for pattern, some in by_pattern(one.placed).items()},
        "unmatched": dict(one.unmatched), "changed_tensors": plan.changed, "output_bytes": plan.size,
        "notes": list(one.notes), "why": why, **({"numbers": numbers(plan)} if numbers else {}),
    }  # fmt: skip


def _effective(matched: Matched, lookup: Names) -> dict[str, Any]:
    """Return component → least, median and greatest factor of B A: the strength times what α makes of it.

    Algorithms whose formula has no such factor are left out.
    """
    found: dict[str, list[float]] = {}
    for key, uses in matched.adapters[0].uses.items():
        for use in uses:
            if "scale" in use.patch.numbers:
                found.setdefault(lookup.component(key), []).append(use.strength * use.patch.numbers["scale"])
    return {component: spread(factors) for component, factors in found.items()}
