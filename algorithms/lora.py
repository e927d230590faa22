"""LoRA, ΔW = (α / r) · B A. Hu et al. 2021, arXiv:2106.09685, section 4.1.

Also LoRA-FA, LoCon, C3Lier and DyLoRA, which store the same tensors. Convolutions: A holds the
kernel and B is 1×1, so the flattened product is the flattened ΔW. With a Tucker core (LoCon,
`mid`), ΔW[o, i, …] = Σ mid[m, n, …] up[o, m] down[n, i].

LyCORIS trains its DyLoRA with α over the number of blocks, which only the file's metadata shows. Without metadata,
a DyLoRA of linear layers has the names, the shapes and the values of a LoRA: it is merged by α / r, as LyCORIS loads
it again, and nothing can be noted. sd-scripts' DyLoRA has the scale α / r if all its ranks are used.
"""

from __future__ import annotations

from functools import reduce
from math import prod
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

from .base import (
    Bypass,
    Factorisation,
    Shape,
    Shapes,
    alpha_over,
    expect,
    flat,
    of_factors,
    other_inputs,
    rank_of,
    same_inputs,
    shape_of_pair,
    tucker,
)

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Scalar


class LoraTensors(NamedTuple):
    """The adapter tensors of n layers of equal shape, stacked."""

    up: Tensor  # B, [n, out, r]
    down: Tensor  # A, [n, r, cols]; with a core [n, r, in]
    scale: Scalar  # α / r
    mid: Tensor | None = None  # Tucker core, [n, r, r, k]


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of up (out, r), down (r, cols or in) and mid (r, r, k)."""
    out, cols = flat(target)
    (rows, rank), (down_rank, width) = flat(shapes["up"]), flat(shapes["down"])
    expect(holds=rank == down_rank, otherwise=f"up has rank {rank}, down has rank {down_rank}")
    expect(holds=rows == out, otherwise=f"up has {rows} rows, the weight has {out}")
    if "mid" not in shapes:
        expect(
            holds=same_inputs(shapes["down"][1:], target[1:]),
            otherwise=other_inputs("down", shapes["down"][1:], target[1:]),
        )
        return {"up": (out, rank), "down": (rank, cols)}
    core = shapes["mid"]
    expect(
        holds=core[:2] == (rank, rank),
        otherwise=f"mid is {list(core)}, up and down have rank {rank}",
    )
    expect(
        holds=target[1:2] == (width,) and core[2:] == target[2:],
        otherwise=f"down and mid cover {[width, *core[2:]]}, the weight has {list(target[1:])}",
    )
    return {"up": (out, rank), "down": (rank, width), "mid": (rank, rank, prod(core[2:]))}


def factors(base: Tensor, t: LoraTensors) -> tuple[Tensor, Tensor]:
    """Return (α / r) · B and A; `base` is not read."""
    return t.up * t.scale, _columns(t)


def accumulate(acc: Tensor, t: LoraTensors, strength: Tensor) -> None:
    """Add strength · ΔW to acc, in one fused multiply-add."""
    add_product(acc, t.up, _columns(t), t.scale, strength)


def add_product(acc: Tensor, left: Tensor, right: Tensor, *factors: Tensor) -> None:
    """Add left @ right, multiplied by the factors, to acc [n, out, cols], in one fused multiply-add.

    `factors`: each [n, 1, 1], by which the thin `left` is multiplied, or one number, which the product takes along.
    """
    if each := [f for f in factors if f.dim()]:
        left = left * reduce(mul, each)
    acc.baddbmm_(left, right, alpha=prod(f.item() for f in factors if not f.dim()))


def _columns(t: LoraTensors) -> Tensor:
    """Return A as [n, r, cols]: `down`, contracted with the core if there is one."""
    return t.down if t.mid is None else tucker(t.mid, t.down)


LORA = of_factors(
    "lora", LoraTensors, fitted_shapes, Factorisation(rank_of("down"), factors), "arXiv:2106.09685",
    scalars_from=alpha_over("down"), row_axes={"up": 0}, accumulate=accumulate, weight_shape=shape_of_pair,
    stores="factors", bypass=Bypass(no_magnitude=True, groups="off"), scale_words=frozenset({"dylora", "split_qkv"}),
)  # fmt: skip
