"""HRA, W' = W · Π (I − 2 ûᵢ ûᵢᵀ). Yuan et al. 2024, arXiv:2405.17484, section 3.

A product of reflections is I − Û T Ûᵀ with T⁻¹ = ½ I + the strict upper triangle of ÛᵀÛ (the
compact WY form, Schreiber and Van Loan 1989), so ΔW is a product of thin matrices. With `apply_GS`
the vectors are orthonormalised first, and T = 2 I; the result depends only on
their span."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .base import Checks, Factorisation, Shape, Shapes, expect, flat, length, of_factors, rank_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class HraTensors(NamedTuple):
    """Reflection vectors as columns."""

    vectors: Tensor  # [n, cols, r]
    orthogonal: bool = False  # `apply_GS`


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shape of vectors (cols, r)."""
    stored, cols = shapes["vectors"], flat(target)[1]
    expect(
        holds=len(stored) == 2 and stored[0] == cols and stored[1] > 0,
        otherwise=f"it is {list(stored)}, the weight has {cols} columns",
    )
    return {"vectors": stored}


def check_settings(settings: Mapping[str, Any], shapes: Shapes, _: Shape) -> None:
    """Raise DoesNotFit for more vectors than can be orthogonal: PEFT orthonormalises rounding errors there."""
    cols, count = shapes["vectors"]
    fits = not settings.get("orthogonal") or count <= cols
    expect(holds=fits, otherwise=f"it has {count} vectors of length {cols}, which cannot be orthogonal")


def factors(base: Tensor, t: HraTensors) -> tuple[Tensor, Tensor]:
    """Return −(W Û) T and Ûᵀ."""
    import torch

    if t.orthogonal:
        basis: Tensor = torch.linalg.qr(t.vectors).Q
        return -2 * (base @ basis), basis.transpose(1, 2)
    tiny = torch.finfo(t.vectors.dtype).tiny  # a vector of zeros reflects nothing
    unit: Tensor = t.vectors / length(t.vectors, (1,)).clamp_(min=tiny)
    inverse = (unit.transpose(1, 2) @ unit).triu(1)
    inverse.diagonal(dim1=1, dim2=2).fill_(0.5)
    inner: Tensor = torch.linalg.solve_triangular(inverse, base @ unit, upper=True, left=False)
    return -inner, unit.transpose(1, 2)


HRA = of_factors(
    "hra", HraTensors, fitted_shapes, Factorisation(rank_of("vectors", 1), factors), "arXiv:2405.17484",
    row_axes={}, reads_base=True, decomposes=True, checks=Checks(settings=check_settings),
)  # fmt: skip
