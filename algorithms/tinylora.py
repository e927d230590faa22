"""TinyLoRA, ΔW = B (Σ vᵢ Pᵢ) A with a few trained values v for several layers. PEFT 0.21.2 tuners/tinylora/layer.py.

A and B are stored singular vectors of the weight. P is random: stored, or drawn again from the configuration's seed
plus the number of the layer. That number also chooses which v a layer uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .base import SEEDED, Checks, Factorisation, Shape, Shapes, expect, expect_shapes, flat, of_factors, rank_of

if TYPE_CHECKING:
    from torch import Tensor


class TinyTensors(NamedTuple):
    """The frozen factors, and the tensors of the matrix between them."""

    up: Tensor  # B, [n, out, r]
    down: Tensor  # A, [n, r, cols]
    vector: Tensor  # v, [n, u]; shared
    mixed: Tensor | None = None  # P, [n, u, r, r]
    seed: int | None = None  # of P, where it is not stored


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the stored shapes."""
    (out, cols), down, vector = flat(target), shapes["down"], shapes["vector"]
    rank = down[0] if down else 0
    expect(
        holds=len(target) == 2 and len(vector) == 1 and rank > 0 < vector[0],
        otherwise=f"A is {list(down)}, v {list(vector)}, the weight {list(target)}",
    )
    want = {"up": (out, rank), "down": (rank, cols), "vector": vector, "mixed": (*vector, rank, rank)}
    return expect_shapes(shapes, {slot: shape for slot, shape in want.items() if slot in shapes})


def check_settings(settings: Mapping[str, Any], shapes: Shapes, _: Shape) -> None:
    """Raise DoesNotFit if the projections are not stored, and no seed is given."""
    expect(
        holds="mixed" in shapes or settings.get("seed") is not None,
        otherwise="its projections (tinylora_P) are not stored, though adapter_config.json says so (save_projection)",
    )


def derive(shapes: Shapes, _: Shape, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Return the projections, drawn as PEFT draws them; nothing if they are stored."""
    import torch

    if "mixed" in shapes:
        return {}
    (count,), rank = shapes["vector"], shapes["down"][0]
    random = torch.Generator().manual_seed(settings["seed"])
    return {"mixed": torch.normal(0.0, 1 / rank**0.5, (count, rank, rank), generator=random)}


def factors(base: Tensor, t: TinyTensors) -> tuple[Tensor, Tensor]:
    """Return B and (Σ vᵢ Pᵢ) A; `base` is not read."""
    assert t.mixed is not None, "derived"
    n, count, rank, _ = t.mixed.shape
    inner = (t.vector[:, None, :] @ t.mixed.reshape(n, count, rank * rank)).view(n, rank, rank)
    return t.up, inner @ t.down


TINYLORA = of_factors(
    "tinylora", TinyTensors, fitted_shapes, Factorisation(rank_of("down"), factors), "PEFT", row_axes={"up": 0},
    shared=frozenset({"vector"}), derive=derive, checks=Checks(SEEDED, settings=check_settings),
)  # fmt: skip
