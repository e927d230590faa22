"""GLoRA, ΔW = (α / r) · (W A₁ A₂ + B₁ B₂). Chavan et al. 2023, arXiv:2306.07967; LyCORIS
lycoris/modules/glora.py.

W is contracted on its input-channel axis. Two layouts share the key names: the present one, and
that of early LyCORIS, where 1 and 2 are exchanged and A spans the whole flattened input. Both fit
the same shapes only if r = in = out; then the present layout is used. Before LyCORIS 3 the forward
pass multiplied by α / r twice, so the trained scale is (α / r)². With rs_lora, LyCORIS trains with
α / √r and stores plain α (unlike its LoCon): only the metadata shows it.
"""

from __future__ import annotations

from math import prod, sqrt
from typing import TYPE_CHECKING, NamedTuple

from .base import Algorithm, Factorisation, Shape, Shapes, alpha_over, expect, flat, same_inputs, tucker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from .base import Scalar


class GloraTensors(NamedTuple):
    """The adapter tensors of n layers of equal shape, stacked."""

    a1: Tensor  # [n, in, r]; old [n, r, cols]
    a2: Tensor  # [n, r, in]; old [n, cols, r]
    b1: Tensor  # [n, out, r]; old [n, r, cols]
    b2: Tensor  # [n, r, cols]; old [n, out, r]; with a core [n, r, in]
    scale: Scalar  # α / r; old (α / r)²
    bm: Tensor | None = None  # Tucker core of B, [n, r, r, k]; written by LyCORIS 3.0
    rs_lora: bool = False


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes without n as in GloraTensors, present layout."""
    out, cols = flat(target)
    inputs = target[1:2] or (1,)
    rank = shapes["a2"][0] if shapes["a2"] else 0
    want = {"a1": (*inputs, rank), "a2": (rank, *inputs), "b1": (out, rank)}
    core = shapes.get("bm")
    want["b2"] = (rank, cols if core is None else inputs[0])
    _expect(shapes, want)
    if core is None:
        expect(
            holds=same_inputs(shapes["b2"][1:], target[1:]),
            otherwise=f"b2 is {list(shapes['b2'])}, the weight has {list(target[1:])} inputs",
        )
        return want
    expect(
        holds=core == (rank, rank, *target[2:]),
        otherwise=f"bm is {list(core)}, the weight is {list(target)} and the rank {rank}",
    )
    return {**want, "bm": (rank, rank, prod(target[2:]))}


def fitted_shapes_old(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes without n as in GloraTensors, old layout."""
    expect(holds="bm" not in shapes, otherwise="bm belongs to the present layout")
    out, cols = flat(target)
    rank = shapes["a1"][0] if shapes["a1"] else 0
    want = {"a1": (rank, cols), "a2": (cols, rank), "b1": (rank, cols), "b2": (out, rank)}
    _expect(shapes, want)
    return want


def _expect(shapes: Shapes, want: Shapes) -> None:
    for slot, shape in want.items():
        expect(
            holds=flat(shapes[slot]) == shape,
            otherwise=f"{slot} is {list(shapes[slot])}, the weight and the rank need {list(shape)}",
        )


def scalars_from_old(alpha: float | None, shapes: Shapes, target: Shape) -> Mapping[str, float]:
    """Return scale = (α / r)²; 1 without an α."""
    return {name: value * value for name, value in alpha_over("a1")(alpha, shapes, target).items()}


def delta(base: Tensor, t: GloraTensors) -> Tensor:
    """Return ΔW [n, out, cols] from the untouched `base`; the thin factors are scaled, not the products."""
    n, out, cols = base.shape
    channels = t.a1.shape[1]
    if channels == cols:
        rows, factors = _joined(base, t)
        return rows @ factors
    changed = (t.b1 * _scale(t)) @ _columns(t)
    rows = base.reshape(n, out, channels, -1).transpose(2, 3).reshape(n, -1, channels)
    through = (rows @ (t.a1 * _scale(t))) @ t.a2  # [n, out·k, in]
    return changed.add_(through.reshape(n, out, -1, channels).transpose(2, 3).reshape(n, out, cols))


def factors(base: Tensor, t: GloraTensors) -> tuple[Tensor, Tensor]:
    """Return the factors of `_joined`; with a kernel, W A₁ of each of its points has columns of its own."""
    import torch

    n, out, cols = base.shape
    channels = t.a1.shape[1]
    if channels == cols:
        return _joined(base, t)
    points, rank = cols // channels, t.a1.shape[2]
    moved = torch.einsum("nock,ncr->nokr", base.reshape(n, out, channels, points), t.a1 * _scale(t))
    spread = base.new_zeros(n, points, rank, channels, points)
    spread.diagonal(dim1=1, dim2=4).copy_(t.a2.unsqueeze(3).expand(-1, -1, -1, points))
    left = torch.cat((moved.reshape(n, out, -1), t.b1 * _scale(t)), 2)
    return left, torch.cat((spread.reshape(n, -1, cols), _columns(t)), 1)


def _rank(shapes: Shapes, target: Shape) -> int:
    return shapes["b1"][1] + shapes["a2"][0] * (flat(target)[1] // shapes["a2"][1])


def accumulate(acc: Tensor, t: GloraTensors, strength: Tensor) -> None:
    """Add strength · ΔW to acc, which is the untouched base."""
    if t.a1.shape[1] != acc.shape[2]:
        acc.addcmul_(strength, delta(acc, t))
        return
    rows, factors = _joined(acc, t)
    acc.baddbmm_(rows.mul_(strength), factors)


def _joined(base: Tensor, t: GloraTensors) -> tuple[Tensor, Tensor]:
    """Return [W A₁, B₁] [n, out, 2r] and [A₂; B₂] [n, 2r, in]: without a kernel, ΔW is their product."""
    import torch

    scale = _scale(t)
    return torch.cat([base @ (t.a1 * scale), t.b1 * scale], 2), torch.cat([t.a2, _columns(t)], 1)


def _columns(t: GloraTensors) -> Tensor:
    """Return B₂ as [n, r, cols], contracted with the core if there is one."""
    return t.b2 if t.bm is None else tucker(t.bm, t.b2)


def _scale(t: GloraTensors) -> Scalar:
    return t.scale * sqrt(t.a2.shape[1]) if t.rs_lora else t.scale


def delta_old(base: Tensor, t: GloraTensors) -> Tensor:
    """Return ΔW [n, out, cols] of the old layout."""
    return delta(base, _renamed(t))


def factors_old(base: Tensor, t: GloraTensors) -> tuple[Tensor, Tensor]:
    """Return the factors of the old layout."""
    return factors(base, _renamed(t))


def accumulate_old(acc: Tensor, t: GloraTensors, strength: Tensor) -> None:
    """Add strength · ΔW of the old layout to acc, which is the untouched base."""
    accumulate(acc, _renamed(t), strength)


def _renamed(t: GloraTensors) -> GloraTensors:
    return t._replace(a1=t.a2, a2=t.a1, b1=t.b2, b2=t.b1)


GLORA = Algorithm(
    "glora", GloraTensors, fitted_shapes, delta, "arXiv:2306.07967",
    scalars_from=alpha_over("a2"), row_axes={"b1": 0}, reads_base=True, accumulate=accumulate,
    low_rank=Factorisation(_rank, factors),
)  # fmt: skip
GLORA_OLD = Algorithm(
    "glora_old", GloraTensors, fitted_shapes_old, delta_old, "arXiv:2306.07967",
    scalars_from=scalars_from_old, row_axes={"b2": 0}, reads_base=True, accumulate=accumulate_old,
    low_rank=Factorisation(lambda shapes, _: 2 * shapes["a1"][0], factors_old),
)  # fmt: skip
