"""LongCat-Video's LoRA of a fused layer, ΔW = c · [B_0 A_0; B_1 A_1; …], with one up factor for each layer in it.

A holds the (r, in) of all layers one below the other, B_j is (rows of layer j, r). c is stored as `alpha_scale` and is
α / r already. https://github.com/meituan-longcat/LongCat-Video longcat_video/modules/lora_utils.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .base import Factorisation, Shape, Shapes, alpha_over, expect, expect_shapes, flat, of_factors, rank_of

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Scalar


class LoraBlocksTensors(NamedTuple):
    """The adapter tensors of n layers of equal shape, stacked."""

    up_0: Tensor  # B_0, [n, rows of the first layer, r]
    down: Tensor  # A, [n, layers · r, in]
    scale: Scalar  # c
    up_1: Tensor | None = None
    up_2: Tensor | None = None
    up_3: Tensor | None = None

    @property
    def ups(self) -> list[Tensor]:
        """B_0, B_1, …"""
        return [up for up in (self.up_0, self.up_1, self.up_2, self.up_3) if up is not None]


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of the up factors (rows, r), which fill the rows, and of down (layers · r, in)."""
    (out, cols), slots = flat(target), sorted(shapes.keys() - {"down"})
    ups = [flat(shapes[slot]) for slot in slots]
    expect(
        holds=slots == [f"up_{n}" for n in range(len(slots))] and sum(rows for rows, _ in ups) == out,
        otherwise=f"the up factors are {', '.join(str([*up]) for up in ups)}, the weight {list(target)}",
    )
    rank = ups[0][1]
    return expect_shapes(
        {slot: flat(shape) for slot, shape in shapes.items()},
        {**{slot: (rows, rank) for slot, (rows, _) in zip(slots, ups, strict=True)}, "down": (len(ups) * rank, cols)},
    )


def factors(_: Tensor, t: LoraBlocksTensors) -> tuple[Tensor, Tensor]:
    """Return c · B with the rank of each layer in columns of its own, and A."""
    rank, rows = t.up_0.shape[2], sum(up.shape[1] for up in t.ups)
    left, done = t.down.new_zeros(t.down.shape[0], rows, t.down.shape[1]), 0
    for number, up in enumerate(t.ups):
        left[:, done : done + up.shape[1], number * rank : (number + 1) * rank] = up * t.scale
        done += up.shape[1]
    return left, t.down


LORA_BLOCKS = of_factors(
    "lora_blocks", LoraBlocksTensors, fitted_shapes, Factorisation(rank_of("down"), factors), "LongCat-Video",
    scalars_from=alpha_over("up_0", 1),
)  # fmt: skip
