"""VeRA, ΔW = (b ⊙ B) (d ⊙ A) with one random A, B for all layers. Kopiczko et al. 2023,
arXiv:2310.11454, section 3.

A [r, widest in] and B [widest out, r] are cut to each layer's size. They are stored once per file,
or drawn again from `projection_prng_key` as in PEFT: A first, then B, uniform in ±√6 / √(columns), on
the CPU in fp32. PVeRA (Huynh et al. 2025, arXiv:2512.07703) learns a mean and a spread;
the mean, the first half of d and of A, is merged. A torch generator gives the same random numbers in
all versions so far."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from .base import SEEDED, Checks, Factorisation, Shape, Shapes, expect, flat, of_factors, rank_of

if TYPE_CHECKING:
    from torch import Tensor


class VeraTensors(NamedTuple):
    """The scales of each layer, and the projections that all layers share."""

    out_scale: Tensor  # b, [n, out, 1]
    rank_scale: Tensor  # d, [n, r, 1]; PVeRA [n, 2r, 1]
    down: Tensor | None = None  # A, [n, r or 2r, widest in]
    up: Tensor | None = None  # B, [n, widest out, r]
    seed: int = 0  # `projection_prng_key`
    widest: Shape = ()  # (out, in), each the largest of all layers with this algorithm


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of out_scale (out, 1), rank_scale (r, 1) and, where stored, down and up."""
    (out, cols), ranks = flat(target), shapes["rank_scale"][0] if len(shapes["rank_scale"]) == 1 else 0
    expect(holds=ranks > 0, otherwise=f"rank_scale is {list(shapes['rank_scale'])}, not a vector")
    expect(
        holds=prod(shapes["out_scale"]) == out,
        otherwise=f"out_scale is {list(shapes['out_scale'])}, not [{out}]",
    )
    fitted: dict[str, Shape] = {"out_scale": (out, 1), "rank_scale": (ranks, 1)}
    if "down" in shapes or "up" in shapes:
        down, up = shapes.get("down", ()), shapes.get("up", ())
        expect(
            holds=len(down) == 2 == len(up),
            otherwise=f"the projections are {list(down)} and {list(up)}",
        )
        expect(
            holds=down[0] == ranks and down[1] >= cols and up[0] >= out and up[1] in (ranks, ranks / 2),
            otherwise=f"projections {list(down)} and {list(up)} of {ranks} ranks do not cover {out}×{cols}",
        )
        fitted |= {"down": down, "up": up}
    return fitted


def factors(base: Tensor, t: VeraTensors) -> tuple[Tensor, Tensor]:
    """Return diag(b) B and diag(d) A, cut to the layer; `base` is not read."""
    assert t.up is not None and t.down is not None, "stored or derived"
    out, cols, rank = base.shape[1], base.shape[2], t.up.shape[2]
    return t.out_scale * t.up[:, :out], t.rank_scale[:, :rank] * t.down[:, :rank, :cols]


def derive(shapes: Shapes, target: Shape, settings: Mapping[str, Any], *, halves: int = 1) -> Mapping[str, Tensor]:
    """Return the projections, drawn as in training; `halves` is 2 for PVeRA."""
    import torch

    expect(holds="seed" in settings, otherwise="the projections are not stored, and no configuration has their seed")
    entries, (out, cols) = shapes["rank_scale"][0], settings["widest"]
    expect(holds=entries % halves == 0, otherwise=f"rank_scale has {entries} numbers, not {halves} for each rank")
    rank = entries // halves
    rows, width = flat(target)
    expect(holds=out >= rows and cols >= width, otherwise=f"projections of {out}×{cols} do not cover {rows}×{width}")
    generator = torch.Generator(device="cpu").manual_seed(settings["seed"])

    def draw(*shape: int) -> Tensor:
        bound = sqrt(3.0) * sqrt(2.0) / sqrt(shape[1])
        return torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)

    down = draw(halves * rank, cols)
    return {"down": down, "up": draw(out, rank)}


VERA = of_factors(
    "vera", VeraTensors, fitted_shapes, Factorisation(rank_of("rank_scale"), factors), "arXiv:2310.11454",
    derive=derive,
    checks=Checks(SEEDED),
)  # fmt: skip
PVERA = of_factors(
    "pvera", VeraTensors, fitted_shapes, Factorisation(lambda shapes, _: shapes["rank_scale"][0] // 2, factors),
    "arXiv:2512.07703", derive=lambda shapes, target, settings: derive(shapes, target, settings, halves=2),
    checks=Checks(SEEDED),
)  # fmt: skip
