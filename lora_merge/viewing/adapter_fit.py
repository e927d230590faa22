"""How an adapter fits a base, from a plan of its merge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..adapters.modules import weight_shapes
from ..errors import MergeError, RemoteError
from ..grouping import by_key
from ..job import Adapter, make_job
from ..matching.fit_errors import explain
from ..models.names import Names
from ..planning.changes import Matches, match
from ..planning.checkpoint_cache import CheckpointCache
from ..planning.inputs import Inputs
from ..planning.make_plan import make_plan
from ..planning.plan import Plan
from ..text import by_component, by_pattern
from .adapter import spread


def adapter_fit(
    path: Path, adapter: Adapter, opened: CheckpointCache, numbers: Callable[[Plan], Any] | None
) -> dict[str, Any]:
    """Return how the adapter fits the base at `path`: `fits`, and what matched or why nothing can: modules by part and
    pattern, strengths, sizes, and what is lost to the dtype.

    `opened`: the checkpoints that are open.
    `numbers`: returns the size of the change and how much of it the base's dtype keeps, which the result has then.
    """
    job = make_job(path, [adapter], path, unmatched="skip")
    base, lookup, file = opened.index(path, adapter=False), opened.names(path), opened.adapter(adapter.path)
    facts: dict[str, Any] = {"adapter": str(adapter.path), "strength": adapter.strength, "total": len(file.modules)}
    try:
        matched = match(Inputs.joined(job, base, lookup, (file,)))
    except RemoteError:
        raise
    except MergeError as e:  # it does not fit, or is incomplete
        error = {"what": e.what, "where": e.where, "fix": e.fix}
        return {**facts, "fits": False, "matched": None, "why": f"{e.what}: {e.where}; {e.fix}", "error": error}
    (matching,) = matched.adapters
    why = ""
    if matching.unmatched:
        misfit = explain(lookup, list(matching.unmatched), weight_shapes(file.modules), file.index)
        why = misfit.text if misfit else ""
    plan = make_plan(matched)
    return {
        **facts, "fits": not matching.unmatched and bool(matching.modules), "algorithms": list(matching.algorithms),
        "matched": matching.modules, "total": matching.total, "components": dict(matching.components),
        "strengths": by_component(matching.strengths),
        "effective": _effective(matched, lookup),
        "patterns": {pattern: len(some) for pattern, some in by_pattern(matching.matched).items()},
        "unmatched": dict(matching.unmatched), "changed_tensors": plan.changed, "output_bytes": plan.size,
        "notes": list(matching.notes), "why": why, **({"numbers": numbers(plan)} if numbers else {}),
    }  # fmt: skip


def _effective(matched: Matches, lookup: Names) -> dict[str, Any]:
    """Return component → least, median and greatest factor of B A: the strength times what α makes of it.

    Algorithms whose formula has no such factor are left out.
    """
    uses = ((key, use) for key, some in matched.adapters[0].uses.items() for use in some)
    scaled = ((key, use) for key, use in uses if "scale" in use.patch.scalars)
    factors = by_key((lookup.component(key), use.strength * use.patch.scalars["scale"]) for key, use in scaled)
    return {component: spread(values) for component, values in factors.items()}
