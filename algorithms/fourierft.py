"""FourierFT, ΔW = c · Re ifft2(S), S zero except for n entries. Gao et al. 2024, arXiv:2405.03003,
section 3.

The positions of the entries are not stored: they are the first n of a random permutation of all
positions, drawn from `random_loc_seed` on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from .base import SEEDED, Algorithm, AlphaOverRank, Checks, Shape, Shapes, expect, flat

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Indices, Scalar


class FourierTensors(NamedTuple):
    """The coefficients and their positions."""

    spectrum: Tensor  # [n, m]
    scale: Scalar  # `scaling`
    seed: int  # `random_loc_seed`
    places: Indices | None = None  # row-major positions, [n, m]; never stored


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shape of spectrum (m,), with at most as many entries as the weight."""
    stored = shapes["spectrum"]
    expect(
        holds=len(stored) == 1 and 0 < stored[0] <= prod(target) and len(target) == 2,
        otherwise=f"it is {list(stored)}, the weight {list(target)}",
    )
    return {"spectrum": stored}


def derive(shapes: Shapes, target: Shape, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Return the slot `places`."""
    return {"places": places(shapes, target, settings["seed"])}


def places(shapes: Shapes, target: Shape, seed: int) -> Tensor:
    """Return the first positions of a random permutation of all positions, one for each coefficient."""
    import torch

    rows, cols = flat(target)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randperm(rows * cols, generator=generator)[: shapes["spectrum"][0]].clone()


def delta(base: Tensor, t: FourierTensors) -> Tensor:
    """Return ΔW [n, out, cols]; the values of `base` are not read."""
    import torch

    assert t.places is not None, "derived"
    dense = base.new_zeros(base.shape[0], base.shape[1] * base.shape[2])
    dense.scatter_(1, t.places, t.spectrum * t.scale[:, :, 0])
    change: Tensor = torch.fft.ifft2(dense.view(base.shape)).real
    return change


FOURIERFT = Algorithm(
    "fourierft", FourierTensors, fitted_shapes, delta, "arXiv:2405.03003", scalars_from=AlphaOverRank(), derive=derive,
    decomposes=True, checks=Checks(SEEDED),
)  # fmt: skip
