"""SuperTuning, some entries changed, and Supra, a LoRA on top of that. PEFT
tuners/supertuning/layer.py.

ΔW = values at row-major positions + (α / r) · B A.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from .base import ON_CPU, Algorithm, AlphaOverRank, Checks, LoadedModule, Rebuild, Shape, Shapes, expect, extra_pair
from .bounds import below

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Indices, Scalar


class SuperTensors(NamedTuple):
    """The values, their positions, and optionally a pair of factors."""

    values: Tensor  # [n, m]
    scale: Scalar  # α / r
    places: Indices | None = None  # [n, m]; if not stored, the positions of the m largest weights
    up: Tensor | None = None  # [n, out, r]
    down: Tensor | None = None  # [n, r, cols]
    top: bool = True  # `select_top`: the largest weights, not the smallest


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of values and places (m,), up (out, r), down (r, cols)."""
    count = prod(shapes["values"])
    expect(
        holds=shapes["values"] == shapes.get("places", (count,)) == (count,) and count <= prod(target),
        otherwise=f"values is {list(shapes['values'])}, places {list(shapes.get('places', ()))}",
    )
    stored = {slot: (count,) for slot in ("values", "places") if slot in shapes}
    return {**stored, **extra_pair(shapes, target)}


def delta(base: Tensor, t: SuperTensors) -> Tensor:
    """Return ΔW [n, out, cols]; the values of `base` are not read."""
    assert t.places is not None, "rebuilt"
    change = base.new_zeros(base.shape[0], base.shape[1] * base.shape[2])
    change = change.scatter_add_(1, t.places, t.values).view(base.shape)
    return change if t.up is None or t.down is None else change.baddbmm_(t.up * t.scale, t.down)


def rebuild(loaded: LoadedModule) -> Mapping[str, Tensor]:
    """Return the positions of the largest magnitudes, or of the smallest, in the order of torch.topk."""
    import torch

    scores = loaded.read("").abs().flatten()
    top = bool(loaded.settings.get("top", True))
    return {"places": torch.topk(scores, loaded.shapes["values"][0], largest=top).indices}


SUPERTUNING = Algorithm(
    "supertuning", SuperTensors, fitted_shapes, delta, "arXiv:2607.09287",
    scalars_from=AlphaOverRank(lambda shapes: shapes["down"][0] if "down" in shapes else 0),
    rebuild=Rebuild(
        frozenset({"places"}), rebuild,
        f"its places are not stored (save_precomputed_indices): those of the largest weights, {ON_CPU}",
    ),
    checks=Checks({"places": lambda _, target: [below(prod(target))]}),
)  # fmt: skip
